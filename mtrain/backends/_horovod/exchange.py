"""Average gradients with ``hvd.DistributedOptimizer``, in groups that are sent during the last backward pass."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import horovod.torch as hvd
import torch
from torch import Tensor

from mtrain.backends._horovod import internals
from mtrain.backends._horovod.collective import wait
from mtrain.backends.waiting import Waits

Compression = Literal["none", "fp16"]
LEAST_GROUPS = 8
"""Smallest number of groups.

The first ones are sent during the backward pass; the last, which all wait for, is short.
"""


class HorovodExchange:
    """The ``Exchange`` of Horovod, whose hooks count micro batches and send a group of gradients when it is complete.

    By default Horovod sends together whatever happens to be ready. A ring adds the ranks' gradients in an order that
    depends on where they lie in a message, so with three or more ranks two runs of one job would be rounded
    differently. Fixed groups avoid that.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        accumulate: int,
        compression: Compression,
        group_bytes: float,
        waits: Waits | None,
    ) -> None:
        self._parameters = list(parameters.values())
        self._distributed = hvd.DistributedOptimizer(
            _OptimizerShell([{"params": self._parameters}]),
            named_parameters=list(parameters.items()),
            compression=_compressor(compression, share=1 / hvd.size()),
            backward_passes_per_step=accumulate,
            op=hvd.Sum,
            groups=groups(self._parameters, group_bytes),
        )
        if waits is not None:
            waits.watch(self, "_wait_for_all")

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing: Horovod's hooks count the micro batches."""
        return nullcontext()

    def finish(self) -> None:
        """Wait until all gradients are averaged.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of
        one rank.
        """
        present = torch.tensor([float(p.grad is not None) for p in self._parameters])
        self._complete()
        self._wait_for_all(present)
        for parameter, on_any_rank in zip(self._parameters, present.tolist(), strict=True):
            if not on_any_rank:
                parameter.grad = None

    def _wait_for_all(self, present: Tensor) -> None:
        """Wait until gradients are averaged and ``present`` is replaced by its maximum over ranks."""
        wait(hvd.allreduce_async_(present, name="mtrain.present", op=hvd.Max))
        self._distributed.synchronize()

    def _complete(self) -> None:
        """Run the backward passes that Horovod still expects of a parameter with gradients of zero.

        A parameter that took no part in a micro batch would otherwise never be sent, and the other ranks would wait.
        """
        missing_passes = internals.missing_passes(self._distributed)
        for parameter in self._parameters:
            for _ in range(missing_passes[parameter]):
                parameter.backward(torch.zeros_like(parameter))


def groups(parameters: Sequence[Tensor], most_bytes: float) -> list[list[Tensor]]:
    """Group parameters in the order of the backward pass, which is the last one first; each group has one dtype.

    A group is at most ``most_bytes``, and at most 1 / ``LEAST_GROUPS`` of all parameters, unless it is a single larger
    one.
    """
    parameter_groups: list[list[Tensor]] = []
    group_bytes = 0
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    most_bytes = min(most_bytes, sum(sizes) / LEAST_GROUPS)
    for parameter, size in zip(reversed(parameters), reversed(sizes), strict=True):
        if not parameter_groups or group_bytes + size > most_bytes or parameter_groups[-1][0].dtype != parameter.dtype:
            parameter_groups.append([])
            group_bytes = 0
        parameter_groups[-1].append(parameter)
        group_bytes += size
    return parameter_groups


class _OptimizerShell:
    """The attributes that ``hvd.DistributedOptimizer`` needs of an optimizer; the engine makes the update itself.

    It is no ``torch.optim.Optimizer``, because constructing one imports torch's compiler.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


def _compressor(compression: Compression, *, share: float) -> type[Any]:
    """Make a ``Compressor`` for Horovod, which converts a gradient before it is sent and after it was received.

    A gradient is sent as a view of its memory, since Horovod accepts contiguous tensors only. It is multiplied by
    ``share`` before it is sent, as in DDP: this rounds alike, and sums in float16 overflow later.
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
    """View all elements of a dense tensor in memory order as a 1-D tensor."""
    if x.is_contiguous():
        return x.detach().view(-1)
    axes = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.detach().permute(axes).view(-1)
