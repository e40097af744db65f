"""The torch engine over Horovod, whose hooks send gradients while they are computed."""

from typing import Protocol

import torch
from torch import nn

from mtrain.backends._horovod.exchange import Compression, HorovodExchange
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.scripts.after_backward import AfterBackward
from mtrain.backends.base import Check
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange


class Options(Protocol):
    """The options of backend ``horovod`` that are used here."""

    compression: Compression

    @property
    def fusion_bytes(self) -> float:
        """Size of a group of gradients in bytes."""
        ...


class HorovodEngine(TorchEngine):
    """One rank of a job on Horovod."""

    def __init__(self, collective: TorchCollective, target: torch.device, *, options: Options, check: Check) -> None:
        super().__init__(collective, target, check=check)
        self._options = options

    @override
    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        if self.collective.size == 1:
            return super().wrap(model, recipe)
        options = self._options
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return model, HorovodExchange(
            trained,
            accumulate=recipe.accumulate,
            compression=options.compression,
            group_bytes=options.fusion_bytes,
            waits=self.waits,
        )

    @override
    def exchanged_halves(self, model: nn.Module) -> set[torch.dtype]:
        return super().exchanged_halves(model) | ({torch.float16} if self._options.compression == "fp16" else set())

    @override
    def wrap_for_own_order(self, model: nn.Module) -> tuple[nn.Module, Exchange]:
        return model, AfterBackward({n: p for n, p in model.named_parameters() if p.requires_grad}, self.collective)
