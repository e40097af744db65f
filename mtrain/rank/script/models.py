"""The models of a script's session, each with an optimizer of its own, and their state as one."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.interfaces import Array, RankSession, Rates, State
from mtrain.core.stepping import Stepper
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
        for entry in self._models:
            if model is entry.model:
                return entry
        raise ScriptError(f"{call}: expected {'a' if len(self) > 1 else 'the'} model that session.prepare returned")

    @property
    def title(self) -> str:
        """Return the classes of the models, for display."""
        classes = [(model.name, type(model.module).__name__) for model in self._models]
        return ", ".join(f"{name}: {kind}" if name else kind for name, kind in classes)

    @property
    def groups(self) -> list[list[str]]:
        """Return the names of the trained parameters by group, over all models."""
        return [
            [prefixed(model.name, parameter) for parameter in group]
            for model in self._models
            for group in model.updater.native.groups
        ]

    def state(self) -> State:
        """Return the state of all models under ``<name>/<name of the array>``; every rank must call."""
        return joined({model.name: model.state(self.rank) for model in self._models})


def prefixed(model: str, name: str) -> str:
    """Return the name of an array among those of all models; an only model keeps its names."""
    return f"{model}/{name}" if model else name


def joined(states: Mapping[str, State]) -> State:
    """Return the states of models by name as one state. Moments are ``<moment>/<model>/<parameter>``."""
    whole = State()
    for model, state in states.items():
        whole.weights |= {prefixed(model, name): x for name, x in state.weights.items()}
        whole.ema |= {prefixed(model, name): x for name, x in state.ema.items()}
        for key, x in state.moments.items():
            moment, _, name = key.partition("/")
            whole.moments[f"{moment}/{prefixed(model, name)}"] = x
        whole.counters |= {prefixed(model, name): x for name, x in state.counters.items()}
    return whole


def part_of(whole: State, model: str) -> State:
    """Return the state of one model in that of a job, as ``joined`` has put it there.

    Raises:
        CheckpointError: the job has no model of this name, or its only one has no name.
    """
    named = models_in(whole.weights)
    if (model or None) not in named:
        names = sorted(name for name in named if name is not None)
        saved = f"the models {', '.join(names)}" if names else "one model without a name"
        given = f"a model named {model}" if model else "a model without a name"
        raise CheckpointError(
            f"session.prepare: {given} is prepared, but the checkpoint has {saved}; use the names of the script that wrote it"
        )
    if not model:
        return whole
    return State(
        weights=_under(f"{model}/", whole.weights),
        ema=_under(f"{model}/", whole.ema),
        moments={
            f"{moment}/{name.removeprefix(f'{model}/')}": x
            for (moment, _, name), x in ((key.partition("/"), x) for key, x in whole.moments.items())
            if name.startswith(f"{model}/")
        },
        counters=_under(f"{model}/", whole.counters),
    )


def models_in(names: Mapping[str, Array] | Sequence[str]) -> set[str | None]:
    """Return the names of the models to which arrays belong; None: a model without a name."""
    return {name.partition("/")[0] if "/" in name else None for name in names}


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}
