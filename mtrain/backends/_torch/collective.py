"""``core.interfaces.Collective`` over torch.distributed, and what the torch engine needs beside it."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Collective
from mtrain.core.serialization import packed, unpacked

T = TypeVar("T")


class LocalCollective:
    """A job of one rank on torch tensors."""

    rank = 0
    local_rank = 0
    size = 1

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """A copy of ``x``."""
        return x.copy() if isinstance(x, np.ndarray) else x.detach().clone()

    def all_gather(self, value: T) -> list[T]:
        """``[value]``."""
        return [value]

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, stacked along a new first axis."""
        return x.detach().unsqueeze(0)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0."""

    def time_waits(self) -> Waits:
        """Stays at 0."""
        return Waits()

    def close(self) -> None:
        """Nothing to let go of."""


class DistributedCollective:
    """The ranks of torch's default process group.

    ``host_group`` carries numpy arrays and objects: a gloo group, so that they never wait for a device.
    """

    def __init__(self, *, local_rank: int, host_group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank()
        self.local_rank = local_rank
        self.size = dist.get_world_size()
        self._host_group = host_group
        self._waits: Waits | None = None

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        on_host = isinstance(x, np.ndarray)
        reduced = torch.from_numpy(x.copy()) if on_host else x.detach().clone()
        # gloo has no AVG.
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        dist.all_reduce(reduced, kind, group=self._host_group if on_host else None)
        if op == "mean":
            reduced /= self.size
        return reduced.numpy() if on_host else reduced

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        mine = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._host_group)
        lengths = [int(size) for size in sizes]
        padded = mine.new_zeros(max(lengths))
        padded[: len(mine)] = mine
        everyone = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(everyone, padded, group=self._host_group)
        return [unpacked(part[:length].numpy().tobytes()) for part, length in zip(everyone, lengths, strict=True)]

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, stacked along a new first axis."""
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind(0)), x.detach().contiguous())
        return gathered

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0: one message per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def time_waits(self) -> Waits:
        """See ``TorchCollective``: whoever calls torch.distributed from Python, waiting is in ``Work.wait``."""
        self._waits = Waits()
        self._waits.watch(dist.Work, "wait")
        return self._waits

    def close(self) -> None:
        """Let go of the process groups. No calls afterwards."""
        self._host_group = None
        if self._waits is not None:
            self._waits.release()


class TorchCollective(Collective, Protocol):
    """What the engine asks of the ranks of any backend on torch.

    One that can tell how long this rank waits in these calls, and as far as it can be seen here in a library's, has a method
    ``time_waits() -> Waits`` besides, which counts from then on.
    """

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, stacked along a new first axis."""
        ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0."""
        ...

    def close(self) -> None:
        """Let go of what connects the ranks. No calls afterwards."""
        ...
