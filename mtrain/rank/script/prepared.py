"""The models that a script has prepared, and the spec that they share with its training loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtrain.core.checkpoint.format import Saved
from mtrain.core.interfaces import Optimizer, RankSession, Recipe, State
from mtrain.core.network.recomputing import blocks_to_compile, patterns
from mtrain.core.samples.sampler import Shares
from mtrain.core.state.nudge import nudge_weights
from mtrain.core.update.recipe import make_recipe, shares_of
from mtrain.data.objects import is_module
from mtrain.errors import ScriptError
from mtrain.rank.script import gradients
from mtrain.rank.script.draws import OwnDraws
from mtrain.rank.script.in_turn import check_in_turn
from mtrain.rank.script.job import RankJob
from mtrain.rank.script.models import ScriptModel, ScriptModels, saved_state
from mtrain.rank.script.native import NativeOptimizer, RecordingOptimizer, record_native
from mtrain.rank.script.records import ScriptRecords
from mtrain.rank.script.rules import Curve, RateOf, Rule
from mtrain.rank.script.schedulers import MakeScheduler, SteppedScheduler, groups_of_rule, make_scheduler
from mtrain.rank.script.settings import SHARED_SETTINGS, change_values, changes_of
from mtrain.rank.script.updater import Updater
from mtrain.rank.spec.precision import settle
from mtrain.spec.model import Spec


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a script asks for a model; see ``Session.prepare``."""

    build: Callable[[], Any]
    optimizer: Rule | NativeOptimizer | None
    schedule: Curve | RateOf | None
    scheduler: MakeScheduler | None
    clip_norm: float | None
    accumulate: int | None
    ema: float | Mapping[str, Any] | None
    precision: str | None
    sync_batchnorm: bool | None
    freeze: Sequence[str] | None
    seed: int | None
    name: str | None
    overlap: bool

    def check_untrained(self, name: str) -> None:
        """Refuse settings of an optimizer for a model that has none.

        Raises:
            ScriptError: there are some.
        """
        settings = ("schedule", "scheduler", "clip_norm", "ema", "freeze")
        if given := [f"{setting}=" for setting in settings if getattr(self, setting) is not None]:
            raise ScriptError(
                f"session.prepare: {', '.join(given)} given for {name!r}, which has no optimizer, so nothing trains it; give optimizer= "
                f"too, or leave {given[0]} out"
            )

    @property
    def learning_rate_of(self) -> RateOf | None:
        """The script's own function from update to learning rate."""
        return self.schedule if callable(self.schedule) and not hasattr(self.schedule, "section") else None


class Prepared:
    """Builds models, binds their optimizers, and keeps the spec of the job up to date with what the script says."""

    def __init__(
        self,
        job: RankJob,
        rank: RankSession,
        records: ScriptRecords,
        saved: Saved | None,
        *,
        saw_gradients: Callable[[], None],
        draws: OwnDraws | None = None,
    ) -> None:
        """``saved``: the checkpoint that is resumed. ``saw_gradients`` is called at each backward pass into a model."""
        self.job = job
        self.draws = draws
        """The generators, where they are the script's own; None: each micro batch is seeded."""
        self.rank = rank
        self.records = records
        self.saved = saved
        self._saw_gradients = saw_gradients
        self.models = ScriptModels(rank=rank)
        self.spec: Spec = job.spec
        """The spec of the job, with the settings of the first model."""
        self.shares: Shares | None = None
        """Which shards of an update this rank computes; None: no model was prepared."""
        self._base = job.spec
        """The spec that all models share, once the first one is prepared."""
        self._shared_settings: Mapping[str, Any] = {}
        """Settings of the script, by path of the spec, that all models share."""

    def add(self, request: ModelRequest) -> ScriptModel:
        """Build a model and bind its optimizer; every rank must call.

        Raises:
            ScriptError: a value is wrong or contradicts the spec, or a name is missing or taken.
            CheckpointError: the checkpoint that is resumed has no such model.
        """
        name = self.models.check_name(request.name)
        trained = not name or request.optimizer is not None
        if not trained:
            request.check_untrained(name)
        spec = self._spec_of(request)
        native_optimizer = record_native(request.optimizer, self.job.outside_paths)
        recipe = self._recipe(spec, request, name=name, trained=trained, native_optimizer=native_optimizer)
        # The same for each model, since they share the loop; the first one has settled the number of micro batches.
        self.shares = shares_of(recipe, self.rank.collective)
        self.records.shards = self.shares.shards * self.shares.rounds
        building = Building(request.build, self.draws)
        model, native = self.rank.prepare(building, recipe)
        if self.draws is not None:
            self.draws.load_state_dict(building.draws)
        if trained:
            gradients.watch(building.module, self._saw_gradients)
        # Known now that the function has been called, inside of `prepare`.
        if native_optimizer is not None:
            spec = self._with_changes(spec, {"optimizer.learning_rate": native_optimizer.learning_rate})
        stepped = self._make_scheduler(request, native_optimizer, spec, name)
        updater = Updater(native, None if stepped is None else stepped.scheduler, untrained="" if trained else name)
        self.spec = spec if not self.models.with_optimizer else self.spec
        entry = ScriptModel(
            name=name,
            spec=spec,
            module=building.module,
            model=model,
            updater=updater,
            learning_rate_of=request.learning_rate_of,
            stepped=stepped,
            own_order=recipe.own_order,
            trained=trained,
            shapes=building.shapes,
        )
        self.models.add(entry)
        # Each model as soon as it is made: the script may follow, copy or count its weights before the loop begins.
        if self.saved is not None:
            self.rank.restore(model, native, saved_state(self.saved.state, name))
        elif self.job.trial is not None and self.job.trial.nudged:
            self._nudge(model, native)
        return entry

    def keep_draws(self) -> AbstractContextManager[None]:
        """Return a context in which random numbers are drawn beside those of the script."""
        return nullcontext() if self.draws is None else self.draws.keep_draws()

    def _nudge(self, model: Any, optimizer: Optimizer) -> None:
        """Move every trained weight by one unit in its last place; every rank must call."""
        weights = self.rank.state(model, optimizer).weights
        trained = {name for names in optimizer.groups for name in names}
        moved = nudge_weights(weights, trained)
        # A tied weight has an entry for each of its names, of which the groups have one.
        twins = {weights[name].tobytes(): name for name in trained}
        tied = {name: moved[twins[x.tobytes()]] for name, x in weights.items() if x.size > 1 and x.tobytes() in twins}
        same_shape = {name: x for name, x in tied.items() if x.shape == weights[name].shape and name not in trained}
        self.rank.restore(model, optimizer, State(weights={**moved, **same_shape}))

    def change(self, changes: Mapping[str, Any], *, call: str) -> Spec:
        """Set values of the job's spec by dotted path, and return it; ``call`` is named in messages.

        Raises:
            ScriptError: a value is wrong, or contradicts one that the user of ``mtrain run`` has set.
        """
        self.spec = self._with_changes(self.spec, changes, call=call)
        return self.spec

    def check_trained(self, call: str) -> Shares:
        """Return which parts of an update this rank computes; refuse a loop before a model was prepared that it can train.

        Raises:
            ScriptError: there is none.
        """
        if self.shares is None:
            raise ScriptError(f"{call}: called before session.prepare; prepare the model first")
        if not self.models.with_optimizer:
            raise ScriptError(
                f"{call}: no model has an optimizer; give session.prepare(..., optimizer=mtrain.AdamW(learning_rate=1e-3)) for one"
            )
        return self.shares

    @property
    def micro_batch(self) -> int:
        """Samples of a micro batch; before ``session.batches`` those of the spec's batch size."""
        assert self.shares is not None
        return max(1, int(self.spec.train.batch_size) // (self.shares.shards * self.shares.rounds))

    @property
    def floats(self) -> Any:
        """The dtype of floating-point numbers in batches; None: as the data set has them."""
        return np.float64 if self.spec.train.precision == "fp64" else None

    def _with_changes(self, spec: Spec, changes: Mapping[str, Any], *, call: str = "session.prepare") -> Spec:
        result: Spec = change_values(spec, changes, outside_paths=self.job.outside_paths, call=call)
        return result

    def _spec_of(self, request: ModelRequest) -> Spec:
        """Return the spec of one model; the first one says what all share.

        Raises:
            ScriptError: a value is wrong, or the model contradicts the first one.
        """
        changes = changes_of(request)
        shared = {path: value for path, value in changes.items() if path in SHARED_SETTINGS}
        self._share(shared, accumulate=request.accumulate)
        spec = self._with_changes(self._base, {path: value for path, value in changes.items() if path not in shared})
        check_in_turn(spec, size=self.rank.collective.size, trial=self.job.trial)
        return spec

    def _share(self, settings: Mapping[str, Any], *, accumulate: int | None) -> None:
        """Take the settings that all models share from the first one, and compare those of further ones.

        Raises:
            ScriptError: a further model has other ones.
        """
        if len(self.models) == 0:
            if self.spec.train.accumulate == "auto" and accumulate is None:
                settings = {**settings, "train.accumulate": 1}
            spec = self._with_changes(self.spec, settings)
            if self.job.trial is not None and self.job.trial.exact:
                # Not among what the user has set, which a script may not contradict.
                spec = change_values(spec, {"train.precision": "fp64"})
            self._base, self.records.choices = settle(spec, self.rank)
            self._shared_settings = settings
            return
        for path, value in settings.items():
            if path not in self._shared_settings or self._shared_settings[path] != value:
                first = self._shared_settings.get(path)
                raise ScriptError(
                    f"session.prepare: {path.rpartition('.')[2]}={value!r} given, but {first!r} for the first model; it holds "
                    "for all models of a session: say it at the first one alone"
                )

    def _recipe(
        self,
        spec: Spec,
        request: ModelRequest,
        *,
        name: str,
        trained: bool,
        native_optimizer: RecordingOptimizer | None,
    ) -> Recipe:
        # The first model is trained in the backend's own way where that is the only one.
        is_further = bool(self.models.with_optimizer) or self.rank.capabilities.own_order
        size = self.rank.collective.size
        # The recipe needs a batch that divides into the shards; the script names its own later, in `batches`.
        shards = spec.cluster.shards or size
        sized = change_values(spec, {"train.batch_size": shards * spec.train.accumulate})
        return replace(
            make_recipe(sized, size=size),
            own_model=True,
            own_order=not request.overlap or (bool(name) and trained and is_further),
            named=bool(name) or self.draws is not None,
            trained=trained,
            native_optimizer=native_optimizer,
            recompute=patterns(sized.train, (), model="of the script"),
            compile_blocks=blocks_to_compile(sized.train, (), model="of the script"),
        )

    def _make_scheduler(
        self, request: ModelRequest, native: RecordingOptimizer | None, spec: Spec, name: str
    ) -> SteppedScheduler | None:
        """Make the scheduler of a model, or take over the one that was made with its optimizer, and keep its state."""
        stepped = None if native is None else native.scheduler
        given = [
            word
            for word, value in (
                ("schedule=", request.schedule),
                ("scheduler=", request.scheduler),
                ("one of the optimizer", stepped),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise ScriptError(f"session.prepare: {' and '.join(given)} are both given; keep one")
        if request.scheduler is not None:
            groups = groups_of_rule(spec.optimizer) if native is None else native.groups
            framework = self.job.resolved.backend.framework
            stepped = make_scheduler(request.scheduler, groups, framework=framework, ratios_stay=native is not None)
        if stepped is not None:
            self.records.kept.keep(f"scheduler of {name}" if name else "scheduler", stepped)
        return stepped


class Building:
    """A function that builds the script's model, and the module that it has built."""

    def __init__(self, build: Callable[[], Any], draws: OwnDraws | None = None) -> None:
        """Check that ``build`` is a function.

        Raises:
            ScriptError: it is a finished module, or cannot be called.
        """
        if not callable(build) or is_module(build):
            raise ScriptError(
                f"session.prepare: the model is a {type(build).__name__}; give a function that builds it, such as "
                "lambda: MyNet(), so that every rank starts from the same random numbers"
            )
        self._build = build
        self._own_draws = draws
        self.draws: Mapping[str, Any] = {}
        """Where the generators of the script were once the model was built, if they are its own."""
        self.module: Any = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the parameters and buffers by name, before a backend splits them."""

    def __call__(self) -> Any:
        """Build the module.

        Raises:
            ScriptError: the function has returned something else.
        """
        module = self._build()
        if self._own_draws is not None:
            self.draws = self._own_draws.state_dict()
        is_keras = any(kind.__module__.partition(".")[0] == "keras" for kind in type(module).__mro__)
        if is_keras or not is_module(module):
            raise ScriptError(
                f"session.prepare: `build` returned a {type(module).__name__}; expected a module of the backend's framework"
            )
        self.module = module
        with suppress(RuntimeError):  # lazy layers have no shapes yet; the backend refuses them by name
            entries = [*module.named_parameters(), *module.named_buffers()]
            self.shapes = {name: tuple(x.shape) for name, x in entries}
        return module
