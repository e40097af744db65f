"""Lightning's parity test, with a session in place of its half for Fabric: their network, data, plain torch loop and comparisons.

From three ranks on, the sum of gradients depends on where an array lies in a bucket. DDP reorders its buckets after the first
pass; in a session it keeps them, so that a resumed job has the bits of an uninterrupted one. Their loop is therefore run with
DDP's setting that keeps buckets as well, for the comparison of bits, and in float64, to see which order is nearer.

usage: fabric_parity.py        on any number of ranks; REFEREES/lightning is a checkout
"""

import os
import sys
import time
from copy import deepcopy
from functools import partial
from types import ModuleType

import lightning_fabric
import torch
import torch.distributed as dist

import mtrain

sys.path.insert(0, os.environ["REFEREES"] + "/lightning/tests")
sys.modules |= {  # Its tests import it by the name of the whole, of which only this part is installed.
    "lightning": ModuleType("lightning"),
    "lightning.fabric": lightning_fabric,
    "lightning.fabric.fabric": sys.modules["lightning_fabric.fabric"],
    "lightning.fabric.accelerators": sys.modules["lightning_fabric.accelerators"],
    "lightning.fabric.accelerators.cuda": sys.modules["lightning_fabric.accelerators.cuda"],
}
from parity_fabric import test_parity_ddp as their_test  # noqa: E402
from parity_fabric.models import ConvNet  # noqa: E402
from parity_fabric.utils import is_state_dict_equal, is_timing_close, make_deterministic  # noqa: E402


def train_session() -> tuple[dict[str, torch.Tensor], torch.Tensor, int, int]:
    """What their ``train_fabric_ddp`` does, in a session: the weights, seconds of each update, rank and number of ranks."""
    make_deterministic()
    data = ConvNet().get_dataloader().dataset  # drawn after the weights, as theirs
    seconds = []
    with mtrain.session() as session:
        model, optimizer = session.prepare(ConvNet, seed=1, optimizer=lambda net: net.get_optimizer())
        begun = deepcopy(model.state_dict())
        size = session.collective.size
        each = ConvNet.batch_size * size
        # Their sampler gives a rank every `size`-th sample, mtrain gives it a block of the global batch.
        place = [rank + size * number for rank in range(size) for number in range(ConvNet.batch_size)]
        order = [each * update + index for update in range(ConvNet.num_steps) for index in place]
        batches = session.batches(data, global_batch=each, updates=ConvNet.num_steps, order=lambda _: order)
        start = time.perf_counter()
        for inputs, labels in batches:
            optimizer.update(torch.nn.functional.cross_entropy(model(inputs), labels))
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        assert not is_state_dict_equal(begun, weights)
        return weights, torch.tensor(seconds), session.collective.rank, size


class Exact(ConvNet):
    """Their network with the same start, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits."""
        return super().forward(x.double())


def train_theirs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights of their plain loop, and the seconds of each update."""
    weights, seconds, _ = their_test.train_torch_ddp(rank, size, backend="gloo")
    dist.barrier()
    dist.destroy_process_group()
    return {name: x.clone() for name, x in weights.items()}, seconds


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


ours, our_seconds, rank, size = train_session()
theirs, their_seconds = train_theirs()
print(f"largest difference of a weight after {ConvNet.num_steps} updates on {size} ranks: {apart(ours, theirs):.3g}")
print(f"median of an update: theirs {their_seconds[3:].median():.6f} s, ours {our_seconds[3:].median():.6f} s")
if size > 2:
    their_test.ConvNet = Exact
    exact, _ = train_theirs()
    print(f"from their loop in float64: theirs {apart(theirs, exact):.3g}, ours {apart(ours, exact):.3g}")
    their_test.ConvNet = ConvNet
    their_test.DistributedDataParallel = partial(their_test.DistributedDataParallel, find_unused_parameters=True)
    theirs, their_seconds = train_theirs()
    print(
        f"from their loop with buckets that stay: {apart(ours, theirs):.3g}, {their_seconds[3:].median():.6f} s an update"
    )
assert is_state_dict_equal(theirs, ours)
if len(os.sched_getaffinity(0)) >= size:  # Ranks that share a core wait for each other's turns.
    assert is_timing_close(their_seconds, our_seconds, rtol=0.02, atol=0.02)
