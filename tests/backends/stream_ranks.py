"""One rank of the tests of streams: ``stream_ranks MODE MEETING RANK SIZE FOLDER``; ``MODE`` is the name of a function here.

``MODE`` may be ``killed:<rank>:<phase>:<number>``: the rank kills itself in that phase of its second save.
"""

import os
import resource
import signal
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mtrain.backends._torch.sharded import streams
from mtrain.backends._torch.sharded.shards import spans_of
from mtrain.backends._torch.sharded.streams import Gather, SplitTorchStream, StateEntry, TorchStream
from mtrain.core.checkpoint import format, together
from mtrain.core.checkpoint.store import Checkpoints, CheckpointStore, NoCheckpoints
from mtrain.core.interfaces import Array, Progress
from mtrain.core.state.digest import digest_of_stream
from mtrain.errors import TrainingError

LARGEST = 3_000_000
SHAPES: dict[str, tuple[int, ...]] = {
    "big": (LARGEST // 500, 500),
    "second": (LARGEST // 2,),
    **dict.fromkeys(("third", "fourth", "fifth"), (LARGEST,)),
    **{f"small.{i}": (3, i) for i in range(40)},
}
PHASES: dict[str, tuple[Any, str]] = {
    "copy": (streams, "_copy_to_host"),
    "header": (format.arrays_file, "header"),
    "transfer": (together, "_write_at"),
    "flush": (os, "fsync"),
    "publish": (format, "flush_folder"),
    "rename": (Path, "rename"),
}


@dataclass
class Rank:
    """The state of a job on one rank, cut as DeepSpeed cuts: a rank may hold nothing of an array, or all of it."""

    rank: int
    size: int
    folder: Path
    gather: Gather
    sends: bool
    """Whether parts are sent to rank 0; else ranks write them."""
    entries: dict[str, StateEntry] = field(default_factory=dict)
    expected: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shape in SHAPES.items():
            self.add(name, torch.arange(float(prod(shape))).view(shape))
        self.add("half", torch.arange(7.0).bfloat16())
        self.entries["whole"], self.expected["whole"] = StateEntry(torch.arange(5), (5,)), np.arange(5)

    def add(self, name: str, values: Tensor) -> None:
        inner = [values.numel() * rank // self.size + len(name) * 7 - 30 for rank in range(1, self.size)]
        spans = spans_of(values.numel(), [0, *inner, values.numel()])
        first, end = spans[self.rank]
        self.entries[name] = StateEntry(values.reshape(-1)[first:end].clone(), tuple(values.shape), spans)
        self.expected[name] = values.float().numpy()

    def stream(self, *, copied: bool) -> TorchStream:
        moments = {"mean/third": self.entries["third"]}
        parts: Any = {"weights": self.entries, "ema": {}, "moments": moments}
        kind = TorchStream if self.sends else SplitTorchStream
        return kind(parts, {"updates": 3.0}, self.gather, copied=copied)

    def checkpoints(self, *, asynchronous: bool) -> CheckpointStore:
        if self.rank:
            return NoCheckpoints(asynchronous=asynchronous)
        return Checkpoints(self.folder, keep_last=9, keep_best=0, asynchronous=asynchronous)

    def check(self, update: int) -> None:
        """Compare what is on the disk with the arrays, on the rank that wrote it."""
        if self.rank == 0:
            saved = format.load(self.folder / f"step-{update:08d}").state
            assert saved.counters == {"updates": 3.0}
            assert saved.weights.keys() == self.expected.keys()
            assert all(saved.weights[name].tobytes() == x.tobytes() for name, x in self.expected.items())
            assert saved.moments["mean/third"].tobytes() == self.expected["third"].tobytes()


def save(checkpoints: CheckpointStore, stream: TorchStream, update: int) -> None:
    checkpoints.save(stream, Progress(update=update), score=None, spec={}, extra={})


def counts(here: Rank) -> None:
    """Print the peak of the memory that numpy has given out during a save, live and copied."""
    checkpoints = here.checkpoints(asynchronous=False)
    for update, copied in ((1, False), (2, True)):
        stream = here.stream(copied=copied)
        tracemalloc.start()
        save(checkpoints, stream, update)
        digest_of_stream(stream, "weights")
        print("peak", tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        here.check(update)


def background(here: Rank) -> None:
    """Change the state and communicate while a copy is saved."""
    checkpoints = here.checkpoints(asynchronous=True)
    save(checkpoints, here.stream(copied=True), 1)
    for entry in here.entries.values():
        entry.tensor.zero_()
    reduced = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(reduced)
        reduced /= here.size
    assert reduced.sum() == 1000
    checkpoints.wait()
    here.check(1)


def full(here: Rank) -> None:
    """Save while files may not become as large as the second checkpoint, then once more."""
    checkpoints = here.checkpoints(asynchronous=True)
    save(checkpoints, here.stream(copied=True), 1)
    checkpoints.wait()
    if here.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, resource.RLIM_INFINITY))
    save(checkpoints, here.stream(copied=True), 2)
    try:
        checkpoints.wait()
    except TrainingError as error:
        print(error)
    if here.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(checkpoints, here.stream(copied=True), 3)  # the ranks are not out of step
    checkpoints.wait()
    here.check(3)


def killed(here: Rank, who: str, phase: str, number: str) -> None:
    """Save twice; rank ``who`` kills itself at call ``number`` of what ``phase`` names in the second save."""
    checkpoints = here.checkpoints(asynchronous=True)
    save(checkpoints, here.stream(copied=True), 1)
    checkpoints.wait()
    if here.rank == int(who):
        _die_in(*PHASES[phase], calls=int(number))
    save(checkpoints, here.stream(copied=True), 2)
    try:
        checkpoints.wait()
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)


def _die_in(module: Any, name: str, *, calls: int) -> None:
    original: Callable[..., Any] = getattr(module, name)
    left = [calls]

    def dying(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(*args, **kwargs)

    setattr(module, name, dying)


def main(mode: str, meeting: str, rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    streams.BUCKET_BYTES = 1 << 20
    gather = Gather(rank=rank, size=size)
    gather.connect(timedelta(seconds=60))
    name, *arguments = mode.removeprefix("sent-").split(":")
    {"counts": counts, "background": background, "full": full, "killed": killed}[name](
        Rank(rank, size, folder, gather, mode.startswith("sent-")), *arguments
    )
    gather.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
