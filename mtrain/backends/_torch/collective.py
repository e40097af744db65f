"""Communication between the ranks of a job on torch: ``core.interfaces.Collective`` plus calls on torch tensors."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Collective
from mtrain.core.ranks.serialization import pack, unpack

T = TypeVar("T")


def own_memory(tensor: Tensor) -> Tensor:
    """Return the tensor in this rank's memory; a buffer of a layer that a tensor group shares is a ``DTensor`` with it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class DistributedCollective:
    """The collective over torch's default process group."""

    def __init__(self, *, host_group: dist.ProcessGroup | None) -> None:
        """Wrap the process group that this rank has joined.

        Args:
            host_group: A gloo group for numpy arrays and objects, so that they never wait for a device; None: they
                travel over the default group, which then must be gloo.
        """
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._host_group = host_group
        self._waits: Waits | None = None

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        on_host = isinstance(x, np.ndarray)
        reduced = torch.from_numpy(x.copy()) if on_host else x.detach().clone()
        # gloo has no ReduceOp.AVG, so "mean" is a sum that is divided afterwards.
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        dist.all_reduce(reduced, reduce_op, group=self._host_group if on_host else None)
        if op == "mean":
            reduced /= self.size
        return reduced.numpy() if on_host else reduced

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        payload = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._host_group)
        # all_gather needs equal lengths on all ranks: payloads are padded to the longest and cut again.
        lengths = [int(size) for size in sizes]
        padded = payload.new_zeros(max(lengths))
        padded[: len(payload)] = payload
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self._host_group)
        del payload, padded
        # Each part is dropped as soon as it is read: the predictions of an evaluation are in memory once, not twice.
        gathered.reverse()
        return [unpack(gathered.pop()[:length].numpy().tobytes()) for length in lengths]

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind(0)), x.detach().contiguous())
        return gathered

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0; sends one message per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in map(own_memory, tensors):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def time_waits(self) -> Waits:
        """Measure waiting time.

        All collectives issued from Python block in ``Work.wait``, so timing that method is enough.
        """
        self._waits = Waits()
        self._waits.watch(dist.Work, "wait")
        return self._waits

    def close(self) -> None:
        """Drop the process groups. The collective must not be used afterwards."""
        self._host_group = None
        if self._waits is not None:
            self._waits.release()


class TorchCollective(Collective, Protocol):
    """The communication that the torch engine needs from any backend on torch.

    A class that is derived from this one inherits the methods that are not abstract: ``time_waits``.
    """

    @abstractmethod
    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        ...

    @abstractmethod
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Drop what connects the ranks. The collective must not be used afterwards."""
        ...

    def time_waits(self) -> Waits | None:
        """Return a counter of the time that this rank waits from now on, or None: it cannot be measured, the default.

        Counted is the time in these calls, and in those of the library as far as they can be observed from Python.
        """
        return None
