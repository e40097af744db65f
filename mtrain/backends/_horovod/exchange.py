"""Gradients averaged by ``hvd.DistributedOptimizer``: an all-reduce each, begun while the last backward pass still runs."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal

import horovod.torch as hvd
import torch
from torch import Tensor

Compression = Literal["none", "fp16"]
Reduction = Literal["average", "adasum"]


class HorovodExchange:
    """``Exchange``: Horovod's hooks count the micro batches, and send each gradient after the last one."""

    def __init__(
        self, parameters: Mapping[str, Tensor], *, accumulate: int, compression: Compression, reduction: Reduction
    ) -> None:
        self._parameters = list(parameters.values())
        self._distributed = hvd.DistributedOptimizer(
            _Shell([{"params": self._parameters}]),
            named_parameters=list(parameters.items()),
            compression=_Half if compression == "fp16" else _Whole,
            backward_passes_per_step=accumulate,
            op=hvd.Average,
            # Divided by the number of ranks before they are added, as DDP does: equal rounding, and fp16 overflows later.
            gradient_predivide_factor=float(hvd.size()),
        )
        if reduction == "adasum":
            # Asked for Adasum, Horovod returns an optimizer that combines steps instead of gradients; the update rule is ours.
            self._distributed.op = hvd.Adasum

    def during(self, *, last: bool) -> nullcontext[None]:
        """Nothing."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for all gradients.

        One that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of one rank.
        """
        present = torch.tensor([float(p.grad is not None) for p in self._parameters])
        told = hvd.allreduce_async_(present, name="mtrain.present", op=hvd.Max)
        for parameter in self._parameters:
            if parameter.grad is None:  # Horovod's own zeros would lie in another memory format
                parameter.grad = torch.zeros_like(parameter)
        self._distributed.synchronize()
        hvd.synchronize(told)
        for parameter, anywhere in zip(self._parameters, present.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None


class _Shell:
    """What ``hvd.DistributedOptimizer`` needs of an optimizer that it wraps; the update itself is the engine's.

    No ``torch.optim.Optimizer``: constructing one imports the compiler.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups


class _Whole:
    """Gradients as they are, as Horovod takes them: contiguous, whichever memory format they have."""

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The same memory, and the gradient."""
        return _memory(gradient), gradient

    @staticmethod
    def decompress(exchanged: Tensor, gradient: Tensor) -> Tensor:
        """The gradient: it was exchanged in place."""
        del exchanged
        return gradient


class _Half:
    """Gradients sent as float16."""

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, Tensor]:
        """A copy in half precision, and the gradient."""
        return _memory(gradient).to(torch.float16), gradient

    @staticmethod
    def decompress(exchanged: Tensor, gradient: Tensor) -> Tensor:
        """The gradient, overwritten with what was exchanged."""
        _memory(gradient).copy_(exchanged)
        return gradient


def _memory(x: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of its memory, as a view of one axis."""
    axes = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.detach().permute(axes).view(-1)
