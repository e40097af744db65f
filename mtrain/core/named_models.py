"""The arrays of several models in one state: those of model ``G`` are named ``G/...``, those of an only model as they are."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from mtrain.core.interfaces import Array, State

T = TypeVar("T")


def prefixed(model: str, name: str) -> str:
    """Return the name of an array among those of all models; an only model, ``""``, keeps its names."""
    return f"{model}/{name}" if model else name


def models_in(names: Iterable[str]) -> list[str]:
    """Return the models to which arrays belong, in their order; ``[""]`` for an only one."""
    return list(dict.fromkeys(name.partition("/")[0] if "/" in name else "" for name in names))


def of_model(model: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values of one model under its own names."""
    return {name.removeprefix(f"{model}/"): x for name, x in values.items() if name.startswith(f"{model}/")}


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
    """Return the state of one of several models, as ``joined`` has put it there."""
    moments: dict[str, dict[str, Array]] = {}
    for key, x in whole.moments.items():
        moment, _, name = key.partition("/")
        moments.setdefault(moment, {})[name] = x
    return State(
        weights=of_model(model, whole.weights),
        ema=of_model(model, whole.ema),
        moments={
            f"{moment}/{name}": x for moment, arrays in moments.items() for name, x in of_model(model, arrays).items()
        },
        counters=of_model(model, whole.counters),
    )
