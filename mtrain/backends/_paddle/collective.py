"""Communication between the ranks of a job on Paddle: ``core.interfaces.Collective`` plus calls on Paddle tensors."""

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


class DistributedCollective:
    """The collective over Paddle's default process group; numpy arrays and objects travel over ``channel`` instead."""

    def __init__(self, *, channel: Channel) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._channel = channel

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        if isinstance(x, np.ndarray):
            return _reduce(self._channel.all_gather(x), op)
        reduced = x.detach().clone()
        # gloo has no ReduceOp.AVG, so "mean" is a sum that is divided afterwards.
        dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return reduced / self.size if op == "mean" else reduced

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        return self._channel.all_gather(value)

    def meet(self) -> None:
        """Return once every rank has called this.

        A collective on tensors must follow within 30 s on gloo. Call this first wherever a rank may be later than that.
        """
        self._channel.all_gather(None)

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        gathered: list[Tensor] = []
        dist.all_gather(gathered, x.detach().contiguous())
        return paddle.stack(gathered)

    @paddle.no_grad()
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` in place with those of rank 0; sends one message per dtype."""
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
        """See ``PaddleCollective.time_waits``. ``FleetJob.wrap`` measures Paddle's own exchange of gradients."""
        waits = Waits()
        waits.watch(self, "all_reduce", "all_gather", "meet", "all_gather_tensor", "broadcast_")
        return waits

    def close(self) -> None:
        """Close the channel. The collective must not be used afterwards."""
        self._channel.close()


def _reduce(arrays: Sequence[Array], op: Literal["sum", "mean", "max"]) -> Array:
    """Reduce the arrays of all ranks element by element, in the order of ranks."""
    reduced = (np.maximum if op == "max" else np.add).reduce(arrays)
    return np.asarray(reduced / len(arrays) if op == "mean" else reduced, arrays[0].dtype)


class PaddleCollective(Collective, Protocol):
    """The communication that the Paddle engine needs from any backend on Paddle."""

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        ...

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite ``tensors`` with those of rank 0."""
        ...

    def time_waits(self) -> Waits:
        """Return a counter of the time that this rank waits in these calls from now on."""
        ...

    def close(self) -> None:
        """Drop what connects the ranks. The collective must not be used afterwards."""
        ...
