"""The torch engine's optimizer where every rank holds a part of each array, and the parts of all ranks are the whole."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from mtrain.backends._torch.average import Average
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.optimizer import Exchange, TorchOptimizer, global_norm
from mtrain.core.interfaces import Recipe
from mtrain.core.optimizer import ema_shares


class ShardedOptimizer(TorchOptimizer):
    """``core.interfaces.Optimizer`` on the parts that a rank holds.

    Rule, clipping and average change the parts in place. ``Exchange.finish`` must leave this rank's part of each averaged
    gradient as the ``grad`` of the part; moments and averages (``moments()``, ``ema()``) are parts too.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        parts: Mapping[str, Tensor],
        exchange: Exchange,
        collective: TorchCollective,
        device: torch.device,
    ) -> None:
        """``parts``: of every parameter by name, sharing memory with what the library keeps; no element is on two ranks."""
        held = cast(nn.Module, _Held(model, parts))
        super().__init__(held, recipe, exchange=exchange, collective=collective, device=device)
        if self._average is not None:
            self._average = _CopiedAverage(self._average.names, self._average.live, partial(ema_shares, recipe))

    @override
    def _norm(self, grads: list[Tensor]) -> float:
        squares = self._collective.all_reduce(np.array([global_norm(grads) ** 2]), "sum")
        return math.sqrt(float(squares[0])) if math.isfinite(squares[0]) else math.nan


class _Held:
    """What a rank holds of a model, with the methods of a model that an optimizer asks for."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Tensor]) -> None:
        self._model = model
        self._parts = {
            name: parts[name].requires_grad_(parameter.requires_grad) for name, parameter in model.named_parameters()
        }

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parts in model order."""
        return iter(self._parts.items())

    def buffers(self) -> Iterator[Tensor]:
        """Whole, as each rank has them."""
        return self._model.buffers()

    def state_dict(self, *, keep_vars: bool) -> dict[str, Tensor]:
        """Live persistent tensors in model order: parts, and whole buffers."""
        entries = self._model.state_dict(keep_vars=keep_vars)
        return {name: self._parts.get(name, tensor) for name, tensor in entries.items()}


class _CopiedAverage(Average):
    """Contents are traded, not pointers: the library looks for parts where they always were."""

    @override
    @torch.no_grad()
    def swap(self) -> None:
        for live, shadow in zip(self.live, self.shadow, strict=True):
            kept = live.detach().clone()
            live.copy_(shadow)
            shadow.copy_(kept)
