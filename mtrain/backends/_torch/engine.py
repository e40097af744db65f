"""The engine that every backend on torch shares: one rank's device, its model, its batches, and its state as numpy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from mtrain.backends._kernels import library
from mtrain.backends._torch import (
    batches,
    compiling,
    convolution,
    device,
    layout,
    native,
    precision,
    quantising,
    recompute,
    state,
    syncbn,
)
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.device import one_thread
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.sharded.streams import Gather, SplitTorchStream, StateEntry, TorchStream
from mtrain.backends.base import Check
from mtrain.backends.engine import Engine, LocalCollective
from mtrain.core.completeness import check_members
from mtrain.core.interfaces import Batch, Capabilities, HostBatch, Part, Recipe, StateStream
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.overriding import override
from mtrain.core.ranks.arithmetic import check_halves
from mtrain.core.update.order import Exchange
from mtrain.errors import SpecError


class TorchEngine(Engine):
    """One rank of a job on torch: the session of every backend on torch.

    A backend with several ranks overrides ``wrap``.
    """

    collective: TorchCollective
    framework_name = "torch"
    _device, _precision, _quantising, _state, _syncbn = device, precision, quantising, state, syncbn

    def __init__(self, collective: TorchCollective, target: torch.device, *, check: Check | None = None) -> None:
        """Make the engine of one rank.

        Args:
            collective: The ranks of the job.
            target: This rank's device, which ``device.choose`` has made the current one.
            check: The ``Backend.check`` of the backend; None: no recipe is refused.

        Raises:
            PluginError: The collective lacks a method of ``TorchCollective``.
        """
        check_members(collective, TorchCollective, where="mtrain.backends.torch_engine")
        super().__init__(collective, target, on_cpu=target.type == "cpu", check=check)
        self.gather = Gather(rank=collective.rank, size=collective.size)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, stream=self.stream)

    @override
    @one_thread()  # start values have the same bits whatever cluster.threads says
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        return super().prepare(build, recipe)

    @override
    def build_model(self, build: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
        model: nn.Module = super().build_model(build, recipe)
        compiling.attach(model, recipe)
        if self.collective.size > 1:
            for dtype in sorted(self.exchanged_halves(model), key=str):
                self._check_halves(dtype)
        return model

    def exchanged_halves(self, model: nn.Module) -> set[torch.dtype]:
        """Return the types of half precision in which gradients of ``model`` are exchanged."""
        return {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}

    def _check_halves(self, dtype: torch.dtype) -> None:
        name, kind = type(self).__name__.removesuffix("Engine").lower(), str(dtype).removeprefix("torch.")

        def give(number: int) -> torch.Tensor:
            return torch.full((2,), number, dtype=dtype, device=self.target)

        try:
            check_halves(self.collective, give, lambda x: x.float().cpu().numpy(), name=name, dtype=kind)
        except ValueError as error:  # Horovod knows no bfloat16.
            raise SpecError(
                f"backend {name}: the model has trained parameters of {kind}, which this backend cannot add up over the ranks "
                f"({error}); keep them in float32, or use ddp"
            ) from error

    @override
    def with_own_optimizer(self, model: nn.Module, recipe: Recipe) -> Recipe:
        return native.make_native(recipe, model)

    @override
    def follow(self, target: Prepared, source: Prepared, share: float, copies_buffers: bool) -> None:
        with torch.no_grad():
            own = dict(self.held_weights(target))
            for name, weight in self.held_weights(source, whole=not self.splits_untrained):
                if share == 1:
                    own[name].copy_(weight)
                else:
                    own[name].lerp_(weight, share)
            if copies_buffers:
                for buffer, other in zip(
                    state.inner(target[0]).buffers(), state.inner(source[0]).buffers(), strict=True
                ):
                    buffer.copy_(other)

    splits_untrained = False
    """Whether ``hold`` splits arrays, as ``wrap`` does."""

    def held_weights(self, prepared: Prepared, *, whole: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a model by name, which share memory with it; ``whole``: those that are split, gathered."""
        for name, parameter in state.inner(prepared[0]).named_parameters():
            yield name, parameter.detach()

    @override
    def optimizer(self, model: nn.Module, recipe: Recipe, exchange: Exchange) -> TorchOptimizer:
        return TorchOptimizer(model, recipe, exchange=exchange, collective=self.collective, device=self.target)

    @override
    def _place(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        check_whole(model)
        self._freeze_as_asked(model, recipe)
        if not recipe.own_model:
            syncbn.make_exact(model)
        if recipe.sync_batchnorm and self.collective.size > 1:
            if syncbn.has_native(self.target, self.collective):
                syncbn.use_native(model)
            else:
                syncbn.synchronize(model, self.collective)
        recompute.attach(model, recipe)
        model = self.move(model)
        if recipe.precision == "fp64":
            model = model.double()
        if recipe.channels_last:
            channels_last(model)
        elif not recipe.own_model:
            layout.use(layout.ContiguousConv2d, model)
        if self.target.type == "cpu" and not recipe.own_model:
            layout.avoid_slow_kernels(model)
            if recipe.kernels == "auto" and not recipe.compile and recipe.precision != "fp64":
                self._use_kernels(model, library.load())
                convolution.use_kernels(model)
        return model

    def move(self, model: nn.Module) -> nn.Module:
        """Return the model on this rank's device."""
        return model.to(self.target)

    @override
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        return batches.upload(loader, self.target)

    def stream(self, model: nn.Module, optimizer: TorchOptimizer, *, copied: bool) -> StateStream:
        """See ``Capabilities.stream``; sets buffers like ``state``."""
        model = state.inner(model)
        self.take_buffers_of_rank_0(model, optimizer)
        entries = self.entries(model, optimizer)
        kind = SplitTorchStream if self.gather.is_connected else TorchStream
        return kind(entries, optimizer.counters(), self.gather, copied=copied)

    def entries(self, model: nn.Module, optimizer: TorchOptimizer) -> Mapping[Part, Mapping[str, StateEntry]]:
        """Return what this rank holds of each array of the state; live tensors."""
        held = {"weights": model.state_dict(), "ema": optimizer.ema(), "moments": optimizer.moments()}
        return {
            part: {name: StateEntry(x, tuple(x.shape)) for name, x in tensors.items()}
            for part, tensors in cast(dict[Part, Mapping[str, torch.Tensor]], held).items()
        }

    @override
    def close(self) -> None:
        self.gather.close()
        super().close()


def check_whole(model: Any) -> None:
    """Refuse a user's model whose weights do not exist yet, or that is not one of torch.

    Raises:
        SpecError: It is not a module of torch, or a weight has no values.
    """
    if not isinstance(model, nn.Module):
        kind = type(model)
        raise SpecError(f"the model is a {kind.__module__}.{kind.__name__}; this backend trains modules of torch")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise SpecError(
                f"the model's weight {name} has no shape yet, as in lazy layers; call the model once with an example before "
                "the function that builds it returns it"
            )
        if parameter.is_meta:
            raise SpecError(f"the model's weight {name} is on the device meta and has no values; build it on the CPU")


def of_one_rank(target: torch.device, *, check: Check | None = None) -> TorchEngine:
    """Make the engine of a job with one rank; ``check``: see ``TorchEngine``."""
    return TorchEngine(LocalCollective(), target, check=check)


def channels_last(model: nn.Module) -> None:
    """Lay all 4-D weights out channels last, in place.

    ``Module.to`` leaves 1x1 weights with the strides of a contiguous tensor, which describe the same memory. Their
    gradients however have channels-last strides, and where the strides differ DDP copies gradients instead of sharing
    its buckets.
    """
    layout.use(nn.Conv2d, model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():
        if parameter.dim() == 4 and parameter.shape[2:] == (1, 1):
            channels = parameter.shape[1]
            parameter.data = parameter.data.as_strided(parameter.shape, (channels, 1, channels, channels))
