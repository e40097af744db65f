"""``core.interfaces.Collective`` over paddle.distributed, and what the Paddle engine needs beside it."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import paddle
from paddle import Tensor
from paddle import distributed as dist

from mtrain.backends._paddle.channel import Channel
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Array, Collective

T = TypeVar("T")


class LocalCollective:
    """A job of one rank on Paddle tensors."""

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
    """The ranks of Paddle's default process group; numpy arrays and objects go over a channel that asks no device."""

    def __init__(self, *, local_rank: int, channel: Channel) -> None:
        self.rank = dist.get_rank()
        self.local_rank = local_rank
        self.size = dist.get_world_size()
        self._channel = channel

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        if isinstance(x, np.ndarray):
            return _reduced(self._channel.all_gather(x), op)
        reduced = x.detach().clone()
        # gloo has no AVG.
        dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return reduced / self.size if op == "mean" else reduced

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        return self._channel.all_gather(value)

    def meet(self) -> None:
        """Return once every rank is here. What follows on tensors has 30 s on gloo: call it after whatever may take longer."""
        self._channel.all_gather(None)

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, stacked along a new first axis."""
        gathered: list[Tensor] = []
        dist.all_gather(gathered, x.detach().contiguous())
        return paddle.stack(gathered)

    @paddle.no_grad()
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0: one message per dtype. Their memory stays where it is."""
        self.meet()
        by_dtype: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
        for group in by_dtype.values():
            flat = paddle.concat([tensor.reshape([-1]) for tensor in group])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(group, flat.split([tensor.size for tensor in group]), strict=True):
                paddle.assign(part.reshape(tensor.shape), tensor)

    def time_waits(self) -> Waits:
        """See ``PaddleCollective.time_waits``; Paddle's own exchange of gradients is watched by ``FleetJob.wrap``."""
        waits = Waits()
        waits.watch(self, "all_reduce", "all_gather", "meet", "all_gather_tensor", "broadcast_")
        return waits

    def close(self) -> None:
        """Let go of the other ranks. No calls afterwards."""
        self._channel.close()


def _reduced(everyone: Sequence[Array], op: Literal["sum", "mean", "max"]) -> Array:
    """Element by element, in the order of ranks."""
    reduced = (np.maximum if op == "max" else np.add).reduce(everyone)
    return np.asarray(reduced / len(everyone) if op == "mean" else reduced, everyone[0].dtype)


class PaddleCollective(Collective, Protocol):
    """What the engine asks of the ranks of any backend on Paddle."""

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, stacked along a new first axis."""
        ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0."""
        ...

    def time_waits(self) -> Waits:
        """Counts from now on how long this rank waits in these calls."""
        ...

    def close(self) -> None:
        """Let go of what connects the ranks. No calls afterwards."""
        ...
