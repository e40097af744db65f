"""Gradients averaged by ``hvd.DistributedOptimizer``, in groups, begun while the last backward pass still runs."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import horovod.torch as hvd
import torch
from torch import Tensor

from mtrain.backends._horovod.collective import wait
from mtrain.backends.waiting import Waits

Compression = Literal["none", "fp16"]
Reduction = Literal["average", "adasum"]
LEAST_GROUPS = 8
"""So many at least: the first travel while the backward pass still runs, and the last, which all wait for, is short."""


class HorovodExchange:
    """``Exchange``: Horovod's hooks count the micro batches, and send a group of gradients when it is complete.

    Left to itself Horovod would send together what happens to be ready. A ring adds the ranks' gradients in an order that
    depends on where they lie in a message: from three ranks on, two runs of one job would be rounded differently.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        accumulate: int,
        compression: Compression,
        reduction: Reduction,
        group_bytes: float,
        waits: Waits | None,
    ) -> None:
        self._parameters = list(parameters.values())
        average = reduction == "average"
        self._distributed = hvd.DistributedOptimizer(
            _Shell([{"params": self._parameters}]),
            named_parameters=list(parameters.items()),
            compression=_sender(compression, share=1 / hvd.size() if average else 1.0),
            backward_passes_per_step=accumulate,
            op=hvd.Sum,
            groups=groups(self._parameters, group_bytes) if average else None,
        )
        if not average:
            # Asked for Adasum, Horovod returns an optimizer that combines steps instead of gradients; the update rule is ours.
            self._distributed.op = hvd.Adasum
        if waits is not None:
            waits.watch(self, "_wait_for_all")

    def during(self, *, last: bool) -> nullcontext[None]:
        """Nothing."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for all gradients.

        One that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of one rank.
        """
        present = torch.tensor([float(p.grad is not None) for p in self._parameters])
        self._complete()
        self._wait_for_all(present)
        for parameter, anywhere in zip(self._parameters, present.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _wait_for_all(self, present: Tensor) -> None:
        """Gradients are averaged, and ``present`` is its maximum over ranks, when this returns."""
        wait(hvd.allreduce_async_(present, name="mtrain.present", op=hvd.Max))
        self._distributed.synchronize()

    def _complete(self) -> None:
        """Let Horovod see as many backward passes of every parameter as it counts on; the missing ones add zero."""
        missing = self._distributed._allreduce_delay
        for parameter in self._parameters:
            for _ in range(missing[parameter]):
                parameter.backward(torch.zeros_like(parameter))


def groups(parameters: Sequence[Tensor], most_bytes: float) -> list[list[Tensor]]:
    """Parameters in the order of backward passes, the last one first, in groups of one type each.

    A group is larger than ``most_bytes``, or than a ``LEAST_GROUPS``th of them all, only where one parameter is.
    """
    found: list[list[Tensor]] = []
    filled = 0
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    most_bytes = min(most_bytes, sum(sizes) / LEAST_GROUPS)
    for parameter, size in zip(reversed(parameters), reversed(sizes), strict=True):
        if not found or filled + size > most_bytes or found[-1][0].dtype != parameter.dtype:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += size
    return found


class _Shell:
    """What ``hvd.DistributedOptimizer`` needs of an optimizer that it wraps; the update itself is the engine's.

    No ``torch.optim.Optimizer``: constructing one imports the compiler.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


def _sender(compression: Compression, *, share: float) -> type[Any]:
    """Horovod's ``Compressor``: what is sent of a gradient, and how it comes back.

    A gradient is sent as the memory it has, since Horovod takes contiguous tensors only. It is multiplied by ``share``
    before it is sent, as DDP does: equal rounding, and sums in float16 that overflow later.
    """
    half = compression == "fp16"

    class Sender:
        @staticmethod
        def compress(gradient: Tensor) -> tuple[Tensor, Tensor]:
            memory = _memory(gradient).mul_(share)
            return (memory.to(torch.float16) if half else memory), gradient

        @staticmethod
        def decompress(exchanged: Tensor, gradient: Tensor) -> Tensor:
            if half:
                _memory(gradient).copy_(exchanged)
            return gradient

    return Sender


def _memory(x: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of its memory, as a view of one axis."""
    if x.is_contiguous():
        return x.detach().view(-1)
    axes = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.detach().permute(axes).view(-1)
