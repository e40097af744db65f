"""Model and data of the tutorial, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: as in the tutorial, random inputs of 20 numbers and one random target each; 2,016 of them instead of 2,048, so
that global batches of 96 (the tutorial's 32 on each of three ranks) divide them. With `--fp64`, plain.py and peer.py
compute in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 2016, 96, 3, 42
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Points(Dataset):
    """Random points and targets."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(0).random((SAMPLES, 21)).astype(np.float32)
        self.inputs, self.targets = torch.from_numpy(numbers).to(DTYPE).split([20, 1], dim=1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def network() -> torch.nn.Module:
    """Build the tutorial's model."""
    return torch.nn.Linear(20, 1).to(DTYPE)


def sampler_order(epoch: int) -> list[int]:
    """Return the order of an epoch by `DistributedSampler`, over all ranks together.

    The sampler gives rank r every size-th sample from r on, so update k of all ranks takes the samples
    [96 k, 96 (k + 1)) of this order for every number of ranks.
    """
    sampler = DistributedSampler(range(SAMPLES), num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return list(sampler)


ORDER = None if "--own-order" in sys.argv else sampler_order
"""None, mtrain's own order, with `--own-order`."""
