"""The torch engine over DistributedDataParallel, which exchanges gradients while they are computed."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from torch import nn

from mtrain.backends._torch.after_backward import AfterBackward
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.deterministic_buckets import DeterministicBucketsDDP
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.optimizer import Exchange
from mtrain.backends.base import Check
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override


class Options(Protocol):
    """The options of backend ``ddp`` that are used here."""

    bucket_mb: float
    static_graph: bool | Literal["auto"]
    find_unused_parameters: bool

    def allows_static_graph(self, recipe: Recipe) -> bool:
        """Return whether DDP allows a static graph."""
        ...


class DdpEngine(TorchEngine):
    """One rank of a job on DDP. ``prepare`` returns the model inside DDP's module."""

    def __init__(self, collective: TorchCollective, target: torch.device, *, options: Options, check: Check) -> None:
        super().__init__(collective, target, check=check)
        self._options = options
        self._wrapped: weakref.WeakSet[DeterministicBucketsDDP] = weakref.WeakSet()

    @override
    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        # A user's own module may return anything and leave out parameters. DDP then searches each graph for them, and
        # its buckets keep their first order.
        options, own = self._options, recipe.own_model
        static_graph = False if own else options.static_graph
        wrapped = DeterministicBucketsDDP(
            model,
            device_ids=[self.target] if self.target.type == "cuda" else None,
            bucket_cap_mb=options.bucket_mb,
            find_unused_parameters=own or options.find_unused_parameters,
            rehearse=not own,
            gradient_as_bucket_view=True,
            static_graph=options.allows_static_graph(recipe) if static_graph == "auto" else static_graph,
        )
        self._wrapped.add(wrapped)
        return wrapped, _Exchange(wrapped, self.waits)

    @override
    def wrap_for_own_order(self, model: nn.Module) -> tuple[nn.Module, Exchange]:
        return model, AfterBackward({n: p for n, p in model.named_parameters() if p.requires_grad}, self.collective)

    @override
    def close(self) -> None:
        """Drop the process groups, those that the models hold included. The models cannot train afterwards."""
        super().close()
        for wrapped in self._wrapped:
            wrapped.release()


class _Exchange:
    """The exchange of DDP, which averages gradients in the backward pass of the last micro batch."""

    def __init__(self, wrapped: DeterministicBucketsDDP, waits: Waits | None) -> None:
        self._wrapped = wrapped
        self._waits = waits
        if waits is not None:
            wrapped.time_every_update()

    def during(self, *, last: bool) -> AbstractContextManager[object]:
        """Suppress DDP's exchange before the last micro batch."""
        return nullcontext() if last else self._wrapped.no_sync()

    def finish(self) -> None:
        """Add up waiting time where it is measured; the exchange itself ended with the last backward pass."""
        if self._waits is not None:
            self._waits.seconds += self._wrapped.exposed_exchange_s()
