"""The torch engine's communication over Horovod."""

import time
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from mtrain.backends.waiting import Waits
from mtrain.core.ranks.serialization import pack, unpack

T = TypeVar("T")
PAUSE_S = 1e-4
"""Interval between two polls of a call that is under way."""


class HorovodCollective:
    """``TorchCollective`` over all ranks of a Horovod job.

    Horovod matches the calls of different ranks by name and caches names, so each kind of call has one name here, the
    same in every update. Two calls are never under way at once.
    """

    def __init__(self) -> None:
        self.rank: int = hvd.rank()
        self.local_rank: int = hvd.local_rank()
        self.size: int = hvd.size()

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``. Arrays on the host are reduced on the host."""
        on_host = isinstance(x, np.ndarray)
        reduced = torch.from_numpy(x.copy()) if on_host else _pack(x).clone()
        wait(hvd.allreduce_async_(reduced, name=_name(op, reduced), op=hvd.Max if op == "max" else hvd.Sum))
        if op == "mean":
            reduced /= self.size
        return reduced.numpy() if on_host else reduced

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        payload = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        sizes = wait(hvd.allgather_async(torch.tensor([len(payload)]), name="mtrain.objects.sizes")).tolist()
        gathered = wait(hvd.allgather_async(payload, name="mtrain.objects"))
        del payload
        return [unpack(part.numpy().tobytes()) for part in gathered.split(sizes)]

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        return wait(hvd.allgather_async(_pack(x).unsqueeze(0), name=_name("gather", x)))

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0; sends one message per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        flats = {dtype: torch.cat([_pack(x).reshape(-1) for x in group]) for dtype, group in by_dtype.items()}
        hvd.broadcast_parameters([(_name("broadcast", flat), flat) for flat in flats.values()], root_rank=0)
        for dtype, group in by_dtype.items():
            parts = flats[dtype].split([tensor.numel() for tensor in group])
            for tensor, part in zip(group, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def time_waits(self) -> Waits:
        """See ``TorchCollective``. ``HorovodExchange`` measures the waiting of Horovod's optimizer."""
        waits = Waits()
        waits.watch(self, "all_reduce", "all_gather", "all_gather_tensor", "broadcast_")
        return waits

    def close(self) -> None:
        """Do nothing: the backend itself shuts Horovod down."""


def wait(handle: int) -> Tensor:
    """Wait for an asynchronous call and return its result.

    ``hvd.synchronize`` alone would wait without sleeping, and take the core from Horovod's own thread where ranks share
    cores.
    """
    while not hvd.poll(handle):
        time.sleep(PAUSE_S)
    result: Tensor = hvd.synchronize(handle)
    return result


def _pack(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _name(kind: str, x: Tensor) -> str:
    return f"mtrain.{kind}.{x.dtype}.{tuple(x.shape)}"
