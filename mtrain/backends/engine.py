"""What the engines of all frameworks do alike: one rank's session, with the framework's own steps as methods to override.

Importing this module imports no framework.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from mtrain.backends._kernels.library import Loaded
from mtrain.backends.base import Check
from mtrain.backends.waiting import Waits
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Array, Batch, Capabilities, Collective, Module, Narrow, RankSession, Recipe, State
from mtrain.core.network.quantising import fit_ranges
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange
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


class LocalCollective(OneRank):
    """The collective of a job with a single rank, for tensors of any framework."""

    def all_gather_tensor(self, x: Any) -> Any:
        """Return ``x`` of all ranks, stacked along a new first axis."""
        return x.detach().unsqueeze(0)

    def broadcast_(self, tensors: Any) -> None:
        """Overwrite ``tensors`` with those of rank 0."""

    def time_waits(self) -> Waits:
        """Return a counter that stays at 0: a single rank waits for nobody."""
        return Waits()

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


def have_gradients(parameters: Sequence[Any], collective: Collective) -> list[bool]:
    """Return of which parameters at least one rank has a gradient; every rank must call with the same ones."""
    own = np.array([float(parameter.grad is not None) for parameter in parameters], np.float32)
    return [bool(flag) for flag in collective.all_reduce(own, "max")]


class Engine(RankSession):
    """One rank of a job, on any framework. A backend with several ranks overrides ``wrap``."""

    collective: Any
    framework_name: str
    """The framework in sentences."""
    _device: ModuleType
    """Module ``device`` of the framework's folder, as those below it are the modules of their names."""
    _precision: ModuleType
    _quantising: ModuleType
    _state: ModuleType
    _syncbn: ModuleType

    def __init__(self, collective: Any, target: Any, *, on_cpu: bool, check: Check | None = None) -> None:
        """Make the engine of one rank; ``on_cpu``: whether ``target``, this rank's device, is the CPU."""
        self.collective = collective
        self.target = target
        self.on_cpu = on_cpu
        self.waits: Waits | None = None
        self.late_figures: bool | Literal["auto"] = "auto"
        """The backend's option ``late_figures``."""
        self.late = False
        """See ``Capabilities.late``; ``prepare`` sets it."""
        self._check = check
        self._recipe: Recipe | None = None

    @property
    @override
    def device(self) -> str:
        return str(self._device.describe(self.target))

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            late=self.late,
            fast_bf16=self._device.fast_bf16(self.target),
            seed=partial(self._device.seed_generators, self.target),
            time_waits=self.time_waits,
            profile=self.profile,
            own_order=self._takes_own_order,
            follow=self.follow,
        )

    # ------------------------------------------------------------------------------------------------- a model
    @override
    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Any, Any]:
        self.refuse(recipe)
        self._seed_start(recipe)
        model = self.build_model(build, recipe)
        model.train()
        if not recipe.trained:
            return self._prepare_untrained(model, recipe)
        if not any(self._state.is_trained(parameter) for parameter in model.parameters()):
            raise SpecError(nothing_to_train(recipe))
        # A script's own optimizer may choose its groups by shape, so it is made before a backend splits the model.
        recipe = self.with_own_optimizer(model, recipe)
        called, exchange = self.wrap_for_own_order(model) if recipe.own_order else self.wrap(model, recipe)
        self._recipe = recipe
        optimizer = self.optimizer(model, recipe, exchange)
        # Only now: whether an update can be read late depends on the rules that the optimizer has made.
        self.late = self._wants_late() and optimizer.can_be_late
        optimizer.follow_ranges(self._quantising.ranges(model, recipe, self.collective))
        return called, optimizer

    def refuse(self, recipe: Recipe) -> None:
        """Refuse a recipe that the backend cannot follow on this rank's device.

        Raises:
            SpecError: See ``Backend.check``.
        """
        if self._check is not None:
            self._check(recipe, size=self.collective.size, on_cpu=self.on_cpu)

    def build_model(self, build: Callable[[], Any], recipe: Recipe) -> Any:
        """Return the model with what the recipe says on this rank's device, the same on all ranks; every rank must call."""
        model = self._place(build(), recipe)
        self._state.check_equal_start(model, self.collective)
        return model

    def _freeze_as_asked(self, model: Any, recipe: Recipe) -> None:
        for name, parameter in model.named_parameters():
            if is_frozen(name, recipe.frozen):
                self._state.freeze(parameter)
        self._quantising.attach(model, recipe)
        # A teacher's weights are all frozen, and still its BatchNorms have the mode that a script sets.
        if recipe.trained:
            self._syncbn.freeze(model)

    def with_own_optimizer(self, model: Any, recipe: Recipe) -> Recipe:
        """Return the recipe with a script's own optimizer made for ``model``, where it must be made before ``wrap``."""
        return recipe

    def _seed_start(self, recipe: Recipe) -> None:
        # Models with a name are built in the stream of the one before, so the first one alone is seeded.
        if self._recipe is None or not (recipe.own_order or recipe.named):
            self._device.seed_generators(self.target, recipe.seed)

    def _prepare_untrained(self, model: Any, recipe: Recipe) -> tuple[Any, Any]:
        """Return what ``prepare`` returns for a model that was placed and that no update changes."""
        for parameter in model.parameters():
            self._state.freeze(parameter)
        self._recipe = recipe
        called, exchange = self.hold(model, recipe)
        return called, self.optimizer(called, recipe, exchange)

    def hold(self, model: Any, recipe: Recipe) -> tuple[Any, Exchange]:
        """Return what ``wrap`` returns for a model that no update changes; the default keeps it whole on every rank."""
        return model, NoExchange()

    def wrap(self, model: Any, recipe: Recipe) -> tuple[Any, Exchange]:
        """Return the module that is called in training, and how its gradients are exchanged.

        The default leaves the model unchanged and exchanges nothing, as is right for one rank.
        """
        return model, NoExchange()

    def wrap_for_own_order(self, model: Any) -> tuple[Any, Exchange]:
        """Return what ``wrap`` returns for a model on which nothing may hang, see ``Recipe.own_order``.

        Raises:
            SpecError: The backend cannot exchange gradients after the backward pass; the default, but for one rank.
        """
        if self.collective.size > 1 or not self._takes_own_order:
            raise SpecError(
                "session.prepare: a second model with an optimizer, or overlap=False, given with a backend that trains one model in one "
                "order; use ddp, horovod, fleet, deepspeed or solo. Models with a name and without an optimizer are no matter"
            )
        return model, NoExchange()

    @property
    def _takes_own_order(self) -> bool:
        """Whether ``wrap_for_own_order`` has an answer."""
        kind = type(self)
        return kind.wrap is Engine.wrap or kind.wrap_for_own_order is not Engine.wrap_for_own_order

    def _wants_late(self) -> bool:
        return not self.on_cpu if self.late_figures == "auto" else self.late_figures

    def _use_kernels(self, model: Any, own: Loaded) -> None:
        """Use mtrain's own kernels if every rank has them: which rank computes a sample must not change its bits."""
        missing = [reason for reason in self.collective.all_gather(own.reason) if reason]
        if not missing:
            self._syncbn.use_kernels(model)
        elif self.collective.rank == 0:
            log.warning(
                "train.kernels: BatchNorm is %s's, slower and with other last bits: %s", self.framework_name, missing[0]
            )

    @override
    def infer(self, model: Module, batch: Batch, *, narrow: Narrow | None = None) -> dict[str, Array]:
        assert self._recipe is not None, "prepare comes first"
        with self._precision.inference_context(self._recipe.precision, self.target):
            output: Mapping[str, Any] = self._state.inner(model)(batch)
            if narrow is not None:
                output = narrow(output)
        return {name: self._state.to_numpy(x) for name, x in output.items()}

    # ------------------------------------------------------------------------------------------------- its state
    @override
    def state(self, model: Module, optimizer: Any) -> State:
        """See ``RankSession.state``.

        Sets the buffers of all ranks to rank 0's, so that training continues with what is saved.
        """
        model = self._state.inner(model)
        self.take_buffers_of_rank_0(model, optimizer)
        to_numpy = self._state.to_numpy
        return State(
            weights=self._state.arrays(model),
            ema={name: to_numpy(x) for name, x in optimizer.ema().items()},
            moments={name: to_numpy(x) for name, x in optimizer.moments().items()},
            counters=optimizer.counters(),
        )

    def take_buffers_of_rank_0(self, model: Any, optimizer: Any) -> None:
        """Set buffers, and their averages, to those of rank 0, once the last update has ended; every rank must call."""
        optimizer.settle()
        parameters = self._state.parameter_names(model)
        averages = (x for name, x in optimizer.ema().items() if name not in parameters)
        self.collective.broadcast_([*model.buffers(), *averages])

    @override
    def restore(self, model: Module, optimizer: Any, saved: State) -> None:
        optimizer.settle()
        model = self._state.inner(model)
        saved = fit_ranges(saved, model.state_dict())
        if saved.weights:
            self._fill_weights(model, optimizer, saved.weights)
            optimizer.ranges_restored()
        # The average comes after the weights: without a saved one it starts from them.
        if saved.ema and optimizer.ema():
            self._fill(optimizer, optimizer.ema(), saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            optimizer.expect_moments(saved.moments)
            self._fill(optimizer, optimizer.moments(), saved.moments, what="optimizer moments")
        # The counters come last: they seed the next update.
        if saved.counters:
            optimizer.set_counters(saved.counters)

    def _fill_weights(self, model: Any, optimizer: Any, weights: Mapping[str, Array]) -> None:
        """Set the weights of ``model``, equal on all ranks; every rank must call."""
        self._fill(optimizer, model.state_dict(), weights, what="weights")
        self._state.check_equal_start(model, self.collective)

    def _fill(self, optimizer: Any, targets: Mapping[str, Any], values: Mapping[str, Array], *, what: str) -> None:
        """Copy whole arrays ``values`` into tensors of the same names; ``what`` they are, for the error message."""
        self._state.fill(targets, values, what=what)

    # ------------------------------------------------------------------------------------------------- measurements
    @override
    def measure(self) -> dict[str, float]:
        measured = {"memory_bytes": float(self._device.peak_memory_bytes(self.target))}
        free_bytes = self._device.free_memory_bytes(self.target)
        if free_bytes is not None:
            measured["device_free_bytes"] = float(free_bytes)
        return measured if self.waits is None else {**measured, "communication_s": self.waits.seconds}

    def time_waits(self) -> None:
        """See ``Capabilities.time_waits``. Does nothing on a GPU, where the device waits and not the process."""
        if self.on_cpu:
            self.waits = self.collective.time_waits()

    def profile(self, file: Path) -> AbstractContextManager[None]:
        """See ``Capabilities.profile``."""
        # Imports the framework's profiler, which training does not need.
        profiling: Any = import_module(f"{self._state.__package__}.profiling")
        context: AbstractContextManager[None] = profiling.record(file, on_gpu=not self.on_cpu)
        return context

    def close(self) -> None:
        """Drop what connects this rank to the others. A backend calls it in ``__exit__``."""
        self.collective.close()

    # ------------------------------------------------------------------------------------------ steps of a framework
    @abstractmethod
    def _place(self, model: Any, recipe: Recipe) -> Any:
        """Change a model as the recipe says, and return it on this rank's device."""

    @abstractmethod
    def optimizer(self, model: Any, recipe: Recipe, exchange: Exchange) -> Any:
        """Make the optimizer of a model after ``wrap`` was applied. Engines that shard arrays override this."""

    @abstractmethod
    def follow(self, target: Any, source: Any, share: float, copies_buffers: bool) -> None:  # noqa: FBT001
        """See ``Capabilities.follow``: ``target += share * (source - target)`` as one operation, or a copy for a share of 1."""
