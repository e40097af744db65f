"""The engine that every backend on torch shares: one rank's device, its model, its batches, and its state as numpy."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from mtrain.backends._kernels import library
from mtrain.backends._torch import (
    batches,
    compiling,
    device,
    layout,
    native,
    precision,
    quantising,
    recompute,
    state,
    syncbn,
)
from mtrain.backends._torch.collective import LocalCollective, TorchCollective
from mtrain.backends._torch.device import one_thread
from mtrain.backends._torch.optimizer import Exchange, TorchOptimizer
from mtrain.backends._torch.parts.streams import Entry, Gather, TorchStream
from mtrain.backends.base import Check
from mtrain.backends.waiting import Waits
from mtrain.core.completeness import check_members
from mtrain.core.interfaces import (
    Array,
    Batch,
    Capabilities,
    HostBatch,
    Narrow,
    Part,
    RankSession,
    Recipe,
    State,
    StateStream,
)
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.network.quantising import fit_ranges
from mtrain.core.overriding import override
from mtrain.core.update.recipe import is_frozen, nothing_to_train
from mtrain.errors import SpecError

log = logging.getLogger(__name__)


class NoExchange:
    """The exchange of a job with one rank, whose gradient already is the mean."""

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing around a micro batch."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: there is nothing to exchange."""


class TorchEngine(RankSession):
    """One rank of a job on torch: the session of every backend on torch.

    A backend with several ranks overrides ``wrap``.
    """

    collective: TorchCollective

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
        self.collective = collective
        self.target = target
        self.waits: Waits | None = None
        self.late_figures: bool | Literal["auto"] = "auto"
        """The backend's option ``late_figures``."""
        self.late = False
        """See ``Capabilities.late``; ``prepare`` sets it."""
        self._check = check
        self.gather = Gather(rank=collective.rank, size=collective.size)
        self._recipe: Recipe | None = None

    @property
    @override
    def device(self) -> str:
        return device.named(self.target)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            late=self.late,
            fast_bf16=device.fast_bf16(self.target),
            seed=partial(device.seed, self.target),
            time_waits=self.time_waits,
            profile=self.profile,
            stream=self.stream,
            own_order=self._takes_own_order,
            follow=self.follow,
        )

    @property
    def _takes_own_order(self) -> bool:
        """Whether ``wrap_for_own_order`` has an answer."""
        kind = type(self)
        return kind.wrap is TorchEngine.wrap or kind.wrap_for_own_order is not TorchEngine.wrap_for_own_order

    def refuse(self, recipe: Recipe) -> None:
        """Refuse a recipe that the backend cannot follow on this rank's device.

        Raises:
            SpecError: See ``Backend.check``.
        """
        if self._check is not None:
            self._check(recipe, size=self.collective.size, on_cpu=self.target.type == "cpu")

    @override
    @one_thread()  # start values have the same bits whatever cluster.threads says
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        self.refuse(recipe)
        self._seed_start(recipe)
        model = self.built(build, recipe)
        compiling.attach(model, recipe)
        model.train()
        if not recipe.trained:
            return self._prepare_untrained(model, recipe)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SpecError(nothing_to_train(recipe))
        recipe = self.with_own_optimizer(model, recipe)
        called, exchange = self.wrap_for_own_order(model) if recipe.own_order else self.wrap(model, recipe)
        self._recipe = recipe
        optimizer = self.optimizer(model, recipe, exchange)
        self.late = self._wants_late() and optimizer.can_be_late
        optimizer.follow_ranges(quantising.ranges(model, recipe, self.collective))
        return called, optimizer

    def built(self, build: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
        """Return the model with what the recipe says on this rank's device, the same on all ranks; every rank must call."""
        model = self._place(build(), recipe)
        state.check_equal_start(model, self.collective)
        return model

    def with_own_optimizer(self, model: nn.Module, recipe: Recipe) -> Recipe:
        """Return the recipe with a script's own optimizer made for ``model``, which is not split yet; see ``native.make_native``."""
        return native.make_native(recipe, model)

    def _seed_start(self, recipe: Recipe) -> None:
        """Seed before a model is built, unless it is built in the stream of the one before."""
        if self._recipe is None or not (recipe.own_order or recipe.named):
            torch.manual_seed(recipe.seed)

    def _prepare_untrained(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        """Return what ``prepare`` returns for a model that was placed and that no update changes."""
        for parameter in model.parameters():
            parameter.requires_grad = False
        self._recipe = recipe
        called, exchange = self.hold(model, recipe)
        return called, self.optimizer(called, recipe, exchange)

    def hold(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        """Return what ``wrap`` returns for a model that no update changes; the default keeps it whole on every rank."""
        return model, NoExchange()

    def follow(self, target: Prepared, source: Prepared, share: float, copies_buffers: bool) -> None:  # noqa: FBT001
        """See ``Capabilities.follow``: ``target += share * (source - target)`` as one operation, or a copy for a share of 1."""
        with torch.no_grad():
            own = dict(self.held_weights(target))
            for name, weight in self.held_weights(source, whole=not self.splits_untrained):
                if share == 1:
                    own[name].copy_(weight)
                else:
                    own[name].lerp_(weight, share)
            if copies_buffers:
                for buffer, other in zip(inner(target[0]).buffers(), inner(source[0]).buffers(), strict=True):
                    buffer.copy_(other)

    splits_untrained = False
    """Whether ``hold`` splits arrays, as ``wrap`` does."""

    def held_weights(self, prepared: Prepared, *, whole: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a model by name, which share memory with it; ``whole``: those that are split, gathered."""
        for name, parameter in inner(prepared[0]).named_parameters():
            yield name, parameter.detach()

    def _wants_late(self) -> bool:
        return self.target.type == "cuda" if self.late_figures == "auto" else self.late_figures

    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        """Return the module that is called in training, and how its gradients are exchanged.

        The default leaves the model unchanged and exchanges nothing, as is right for one rank.
        """
        return model, NoExchange()

    def wrap_for_own_order(self, model: nn.Module) -> tuple[nn.Module, Exchange]:
        """Return what ``wrap`` returns for a model on which nothing may hang, see ``Recipe.own_order``.

        Raises:
            SpecError: The backend cannot exchange gradients after the backward pass; the default, but for one rank.
        """
        if self.collective.size > 1 or not self._takes_own_order:
            raise SpecError(no_own_order())
        return model, NoExchange()

    def optimizer(self, model: nn.Module, recipe: Recipe, exchange: Exchange) -> TorchOptimizer:
        """Make the optimizer of a model after ``wrap`` was applied. Engines that shard arrays override this."""
        return TorchOptimizer(model, recipe, exchange=exchange, collective=self.collective, device=self.target)

    def _place(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        check_whole(model)
        for name, parameter in model.named_parameters():
            if is_frozen(name, recipe.frozen):
                parameter.requires_grad = False
        quantising.attach(model, recipe)
        if recipe.trained:
            syncbn.freeze(model)
        if not recipe.own_model:
            syncbn.make_exact(model)
        if recipe.sync_batchnorm and self.collective.size > 1:
            if syncbn.has_native(self.target, self.collective):
                syncbn.use_native(model)
            else:
                syncbn.synchronize(model, self.collective)
        recompute.attach(model, recipe)
        model = self.moved(model)
        if recipe.precision == "fp64":
            model = model.double()
        if recipe.channels_last:
            channels_last(model)
        elif not recipe.own_model:
            layout.use(layout.ContiguousConv2d, model)
        if self.target.type == "cpu" and not recipe.own_model:
            layout.avoid_slow_kernels(model)
            if recipe.kernels == "auto" and not recipe.compile and recipe.precision != "fp64":
                self._use_kernels(model)
        return model

    def moved(self, model: nn.Module) -> nn.Module:
        """Return the model on this rank's device."""
        return model.to(self.target)

    def _use_kernels(self, model: nn.Module) -> None:
        """Use mtrain's own kernels if every rank has them: which rank computes a sample must not change its bits."""
        missing = [reason for reason in self.collective.all_gather(library.load().reason) if reason]
        if not missing:
            syncbn.use_kernels(model)
        elif self.collective.rank == 0:
            log.warning("train.kernels: BatchNorm is torch's, slower and with other last bits: %s", missing[0])

    @override
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        return batches.upload(loader, self.target)

    @override
    def infer(self, model: nn.Module, batch: Batch, *, narrow: Narrow | None = None) -> dict[str, Array]:
        assert self._recipe is not None, "prepare comes first"
        with torch.no_grad(), precision.forward_context(self._recipe.precision, self.target):
            output: Mapping[str, Any] = inner(model)(batch)
            if narrow is not None:
                output = narrow(output)
        return {name: state.to_numpy(x) for name, x in output.items()}

    @override
    def state(self, model: nn.Module, optimizer: TorchOptimizer) -> State:
        """See ``RankSession.state``.

        Sets the buffers of all ranks to rank 0's, so that training continues with what is saved.
        """
        model = inner(model)
        self.take_buffers_of_rank_0(model, optimizer)
        return State(
            weights=state.arrays(model),
            ema={name: state.to_numpy(x) for name, x in optimizer.ema().items()},
            moments={name: state.to_numpy(x) for name, x in optimizer.moments().items()},
            counters=optimizer.counters(),
        )

    def stream(self, model: nn.Module, optimizer: TorchOptimizer, *, copied: bool) -> StateStream:
        """See ``Capabilities.stream``; sets buffers like ``state``."""
        model = inner(model)
        self.take_buffers_of_rank_0(model, optimizer)
        return TorchStream(self.entries(model, optimizer), optimizer.counters(), self.gather, copied=copied)

    def entries(self, model: nn.Module, optimizer: TorchOptimizer) -> Mapping[Part, Mapping[str, Entry]]:
        """Return what this rank holds of each array of the state; live tensors."""
        held = {"weights": model.state_dict(), "ema": optimizer.ema(), "moments": optimizer.moments()}
        return {
            part: {name: Entry(x, tuple(x.shape)) for name, x in tensors.items()}
            for part, tensors in cast(dict[Part, Mapping[str, torch.Tensor]], held).items()
        }

    def take_buffers_of_rank_0(self, model: nn.Module, optimizer: TorchOptimizer) -> None:
        """Set buffers, and their averages, to those of rank 0, once the last update has ended; every rank must call."""
        optimizer.settle()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        averages = (x for name, x in optimizer.ema().items() if name not in parameters)
        self.collective.broadcast_([*model.buffers(), *averages])

    @override
    def restore(self, model: nn.Module, optimizer: TorchOptimizer, saved: State) -> None:
        optimizer.settle()
        model = inner(model)
        saved = fit_ranges(saved, model.state_dict())
        if saved.weights:
            state.fill(model.state_dict(), saved.weights, what="weights")
            optimizer.ranges_restored()
        if saved.ema and optimizer.ema():
            state.fill(optimizer.ema(), saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            optimizer.expect_moments(saved.moments)
            state.fill(optimizer.moments(), saved.moments, what="optimizer moments")
        if saved.counters:
            optimizer.set_counters(saved.counters)
        state.check_equal_start(model, self.collective)

    @override
    def measure(self) -> dict[str, float]:
        measured = {"memory_bytes": float(device.peak_memory_bytes(self.target))}
        free_bytes = device.free_memory_bytes(self.target)
        if free_bytes is not None:
            measured["device_free_bytes"] = float(free_bytes)
        return measured if self.waits is None else {**measured, "communication_s": self.waits.seconds}

    def time_waits(self) -> None:
        """See ``Capabilities.time_waits``. Does nothing on CUDA, where the device waits and not the process."""
        if self.target.type == "cpu":
            self.waits = self.collective.time_waits()

    def profile(self, file: Path) -> AbstractContextManager[None]:
        """See ``Capabilities.profile``."""
        from mtrain.backends._torch import profiling  # imports torch.profiler, which training does not need

        return profiling.recorded(file, on_gpu=self.target.type == "cuda")

    def close(self) -> None:
        """Drop what connects this rank to the others. A backend calls it in ``__exit__``."""
        self.gather.close()
        self.collective.close()


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


def no_own_order() -> str:
    """Return the refusal of a backend whose exchange hangs on the model, see ``Recipe.own_order``."""
    return (
        "session.prepare: a second model with an optimizer, or overlap=False, given with a backend that trains one model in one order; "
        "use ddp, horovod, fleet, deepspeed or solo. Models with a name and without an optimizer are no matter"
    )


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


def inner(model: nn.Module) -> nn.Module:
    """Return the model that was built, without the module that a backend wrapped around it."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model
