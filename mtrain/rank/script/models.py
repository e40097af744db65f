"""The models of a script's session, each with an optimizer of its own, and their state as one."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.interfaces import RankSession, Rates, State
from mtrain.core.state.named_models import join_states, models_in, part_of, prefix
from mtrain.core.update.stepping import Stepper
from mtrain.errors import CheckpointError, ScriptError
from mtrain.rank.script.rules import RateOf
from mtrain.rank.script.schedulers import SteppedScheduler
from mtrain.rank.script.updater import Updater
from mtrain.spec.model import Spec

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ScriptModel:
    """A model that ``session.prepare`` has returned."""

    name: str
    """Empty where it is the only one."""
    spec: Spec
    """The job's spec with the optimizer, schedule and settings of this model."""
    module: Any
    """The module that the script has built; ``model`` is what the backend has made of it."""
    model: Any
    updater: Updater
    learning_rate_of: RateOf | None
    """The script's own function from update to learning rate."""
    stepped: SteppedScheduler | None
    """The scheduler that the script steps."""
    own_order: bool
    trained: bool = True
    """Whether it has an optimizer that changes it."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its whole parameters and buffers, by name."""

    def state(self, rank: RankSession) -> State:
        """Return the state of model and optimizer; every rank must call."""
        return rank.state(self.model, self.updater.native)

    def stepper(self, schedule: Callable[[int], Rates], *, count: int) -> Stepper:
        """Return this model's optimizer for a training loop."""
        return Stepper(self.updater.native, schedule, count=count, name=self.name, own_order=self.own_order)


@dataclass(kw_only=True)
class ScriptModels:
    """The models of a session, in the order in which they were prepared."""

    rank: RankSession
    _models: list[ScriptModel] = field(default_factory=list)

    def __iter__(self) -> Iterator[ScriptModel]:
        """Iterate over the models."""
        return iter(self._models)

    @property
    def with_optimizer(self) -> list[ScriptModel]:
        """The models that have an optimizer."""
        return [model for model in self._models if model.trained]

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._models)

    def check_name(self, name: str | None) -> str:
        """Return the name of a model that is about to be prepared, empty for an only one.

        Raises:
            ScriptError: the name is none or taken, or one of several models has none.
        """
        if name is None:
            if self._models:
                raise ScriptError(
                    "session.prepare: called a second time without a name; give each of several models one: "
                    'session.prepare(..., name="G")'
                )
            return ""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ScriptError(f"session.prepare: name {name!r} given; expected letters, digits and _, such as 'G'")
        if self._models and not self._models[0].name:
            raise ScriptError(
                f"session.prepare: name={name!r} given, but the first model has no name; name each of several models"
            )
        if name in {model.name for model in self._models}:
            raise ScriptError(f"session.prepare: the name {name!r} is taken; give each model one of its own")
        return name

    def add(self, model: ScriptModel) -> None:
        """Add a model."""
        self._models.append(model)

    def of(self, model: Any, *, call: str) -> ScriptModel:
        """Return the entry of a model that ``session.prepare`` has returned.

        Raises:
            ScriptError: it has returned another one, or none.
        """
        # By identity: comparing modules may be a method of the user's.
        for entry in self._models:
            if model is entry.model:
                return entry
        raise ScriptError(
            f"{call}: expected {'a' if len(self) > 1 else 'the'} model that session.prepare returned, given a {type(model).__name__}"
        )

    @property
    def title(self) -> str:
        """Return the classes of the models, for display."""
        classes = [(model.name, type(model.module).__name__) for model in self._models]
        return ", ".join(f"{name}: {kind}" if name else kind for name, kind in classes)

    @property
    def groups(self) -> list[list[str]]:
        """Return the names of the trained parameters by group, over all models."""
        return [
            [prefix(model.name, parameter) for parameter in group]
            for model in self.with_optimizer
            for group in model.updater.native.groups
        ]

    def state(self) -> State:
        """Return the state of all models under ``<name>/<name of the array>``; every rank must call."""
        return join_states({model.name: model.state(self.rank) for model in self._models})

    @property
    def as_stepped(self) -> list[tuple[str, Any, Any]]:
        """Name, model and optimizer of each, for ``TrainingRecords``."""
        return [(model.name, model.model, model.updater.native) for model in self._models]


def saved_state(whole: State, model: str) -> State:
    """Return the state of one model in that of a checkpoint.

    Raises:
        CheckpointError: the job has no model of this name, or its only one has no name.
    """
    names = models_in(whole.weights)
    if model not in names:
        saved = f"the models {', '.join(sorted(names))}" if names != [""] else "one model without a name"
        given = f"a model named {model}" if model else "a model without a name"
        raise CheckpointError(
            f"session.prepare: {given} is prepared, but the checkpoint has {saved}; use the names of the script that wrote it"
        )
    return part_of(whole, model) if model else whole


def check_follow(target: ScriptModel, source: ScriptModel, tau: Any) -> None:
    """Refuse what ``session.follow`` cannot do.

    Raises:
        ScriptError: the target is trained or is the source, the two differ in their arrays, or ``tau`` is no share.
    """
    if target is source:
        raise ScriptError("session.follow: the target and the source are the same model; give two")
    if target.trained:
        name = repr(target.name) if target.name else "the model"
        raise ScriptError(
            f"session.follow: {name} has an optimizer, which trains it; prepare the target with a name and without one: "
            'session.prepare(build, name="target")'
        )
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau <= 1:
        raise ScriptError(
            f"session.follow: tau={tau!r} given; expected a number above 0 and at most 1, which copies the source"
        )
    if target.shapes != source.shapes:
        both = sorted(target.shapes.keys() | source.shapes.keys())
        name = next(name for name in both if target.shapes.get(name) != source.shapes.get(name))
        shapes = (str(x.shapes.get(name, "absent")) for x in (target, source))
        raise ScriptError(
            "session.follow: the target and the source have different arrays: {} is {} in the one and {} in the other; build both "
            "alike".format(name, *shapes)
        )
