"""A training script whose updates differ in their number of samples, or take a batch of each of two data sets."""

import argparse
import sys
import time
from pathlib import Path

import torch
from points import Plain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mtrain

EPOCHS = 4


class Buckets:
    """Batches of 1 to 7 neighbours, other ones in each epoch, and more of them in odd epochs."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        first = 0
        while first < self.length:
            size = min(1 + int(torch.randint(7 - 3 * (self.epoch % 2), (), generator=generator)), self.length - first)
            yield list(range(first, first + size))
            first += size


def growing(epoch: int) -> int:
    return 4 * 2**epoch


LABELLED, UNLABELLED = Plain(50, 0), Plain(26, 1)
MODES = {
    "buckets": lambda: (DataLoader(LABELLED, batch_sampler=Buckets(50)), {}),
    "growing": lambda: (LABELLED, {"global_batch": growing}),
    "last": lambda: (DataLoader(LABELLED, batch_size=12, shuffle=True), {}),
    "together": lambda: (
        {"labelled": DataLoader(LABELLED, batch_size=12, shuffle=True), "other": UNLABELLED},
        {"global_batch": {"labelled": 12, "other": 6}},
    ),
}


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    if isinstance(batch, dict):
        return (
            F.cross_entropy(model(batch["labelled"][0]), batch["labelled"][1])
            + 0.1 * model(batch["other"][0]).square().mean()
        )
    return F.cross_entropy(model(batch[0]), batch[1])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--order", action="store_true", help="write which samples each update has taken")
    flags = parser.parse_args()
    loader, settings = MODES[flags.mode]()
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            net, optimizer=mtrain.AdamW(learning_rate=1e-2), schedule=mtrain.Cosine(), clip_norm=0.5,
            precision="fp64", accumulate=flags.accumulate,
        )  # fmt: skip
        for batch in session.batches(loader, epochs=EPOCHS, workers=flags.workers, **settings):
            time.sleep(flags.delay)
            optimizer.update(loss_of(model, batch))
            if flags.order:
                with Path("order.txt").open("a") as file:
                    print(batch[0][:, 0].tolist(), file=file)
        session.print(f"{session.progress.update} updates, {session.progress.samples} samples")


if __name__ == "__main__":
    sys.exit(main())
