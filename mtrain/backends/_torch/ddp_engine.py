"""The torch engine over DistributedDataParallel, which exchanges gradients while they are computed."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import nn

from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.internals import LightDDP
from mtrain.backends._torch.scripts.after_backward import AfterBackward
from mtrain.backends.base import Check
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange
from mtrain.errors import ScriptError


class DeterministicBucketsDDP(LightDDP):
    """A DDP whose buckets have their final order before the first update.

    DDP reorders its buckets after the first backward pass it sees, and a ring adds the ranks' gradients in an order
    that depends on where they lie in a bucket. With three or more ranks the first update of a process would therefore
    be rounded differently from the same update of a process that has been running, and a resumed job would not match
    the uninterrupted one bit for bit. One discarded pass over the first micro batch settles the order; with a static
    graph it takes two, because the first pass only counts and the second records the order. Two ranks have a single
    order of addition, so nothing is done.

    With ``rehearse=False`` there is no such pass, because the module may return anything. The caller must then set
    ``find_unused_parameters``, under which DDP keeps its buckets in the order of the parameters from the start.
    """

    def __init__(self, *inputs: Any, rehearse: bool = True, **kwargs: Any) -> None:
        self._settled = not rehearse
        super().__init__(*inputs, **kwargs)

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context for a micro batch that is not the last one of its update."""
        context: AbstractContextManager[None] = super().no_sync()
        return context

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._settled and self.training and torch.is_grad_enabled():
            self._settled = True
            if torch.distributed.get_world_size(self.process_group) > 2:
                self._rehearse(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def _rehearse(self, *inputs: Any, **kwargs: Any) -> None:
        """Run forward and backward with an exchange, then restore buffers, gradients and random state."""
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        device = next(self.module.parameters()).device
        sync_before = self.require_backward_grad_sync
        self.require_backward_grad_sync = True
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2 if self.static_graph else 1):
                total = super().forward(*inputs, **kwargs)["total"]
                with torch.autocast(device.type, enabled=False):
                    total.backward()
                clear_gradients(self.module)
        self.require_backward_grad_sync = sync_before
        torch.clear_autocast_cache()
        with torch.no_grad():
            for buffer, saved in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(saved)


def refuse_no_sync() -> NoReturn:
    """Refuse what scripts for DDP call between updates."""
    raise ScriptError(
        "model.no_sync(): leave it out; session.prepare(accumulate=N) exchanges gradients once per update of N micro batches, and "
        "without that exchange the ranks would train different weights"
    )


def clear_gradients(model: nn.Module) -> None:
    """Drop the gradient of every parameter."""
    for parameter in model.parameters():
        parameter.grad = None


class Options(Protocol):
    """The options of backend ``ddp`` that are used here."""

    bucket_mb: float
    static_graph: bool | Literal["auto"]
    find_unused_parameters: bool

    def allows_static_graph(self, recipe: Recipe) -> bool:
        """Return whether DDP allows a static graph."""
        ...


class DdpEngine(TorchEngine):
    """One rank of a job on DDP. ``prepare`` returns the model inside DDP's module, a user's own module as it is."""

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
        # Scripts may call a module of their own, and its methods, several times for one loss, and each graph has parameters of its own.
        if own:
            model.__dict__.setdefault("no_sync", refuse_no_sync)
            return model, _OfLosses(wrapped, self.waits)
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
        return nullcontext() if last else self._wrapped.without_exchange()

    def finish(self) -> None:
        """Add up waiting time where it is measured; the exchange itself ended with the last backward pass."""
        if self._waits is not None:
            self._waits.seconds += self._wrapped.exposed_exchange_s()


class _OfLosses(_Exchange):
    """The exchange of a module that is called without DDP, which expects gradients by the graph of the loss itself."""

    _last = True

    @override
    def during(self, *, last: bool) -> nullcontext[None]:
        self._last = last
        return nullcontext()

    def before_backward(self, loss: torch.Tensor) -> None:
        """Get ready to exchange the gradients of ``loss``, if it is that of the last micro batch."""
        if self._last:
            self._wrapped.expect(loss)
