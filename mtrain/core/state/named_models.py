"""The arrays of several models in one state: those of model ``G`` are named ``G/...``, those of an only model as they are."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mtrain.core.interfaces import Array, State
from mtrain.core.state.selected import Selected

T = TypeVar("T")


def prefix(model: str, name: str) -> str:
    """Return the name of an array among those of all models; an only model, ``""``, keeps its names."""
    return f"{model}/{name}" if model else name


def models_in(names: Iterable[str]) -> list[str]:
    """Return the models to which arrays belong, in their order; ``[""]`` for an only one."""
    return list(dict.fromkeys(name.partition("/")[0] if "/" in name else "" for name in names))


def of_model(model: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values of one model under its own names."""
    return {name.removeprefix(f"{model}/"): x for name, x in values.items() if name.startswith(f"{model}/")}


def rename_entry(part: str, model: str, name: str) -> str:
    """Return the name of an entry of one model's state among those of all; moments are ``<moment>/<model>/<parameter>``."""
    if part != "moments":
        return prefix(model, name)
    moment, _, parameter = name.partition("/")
    return f"{moment}/{prefix(model, parameter)}"


def join_states(states: Mapping[str, State]) -> State:
    """Return the states of models by name as one state. Moments are ``<moment>/<model>/<parameter>``."""
    parts: dict[str, dict[str, Any]] = {
        part: {
            rename_entry(part, model, name): x
            for model, state in states.items()
            for name, x in getattr(state, part).items()
        }
        for part in ("weights", "ema", "moments", "counters")
    }
    return State(**parts)


def part_of(whole: State, model: str) -> State:
    """Return the state of one of several models, as ``join_states`` has put it there; arrays are read when they are used."""
    return State(
        weights=_of_model("weights", model, whole.weights),
        ema=_of_model("ema", model, whole.ema),
        moments=_of_model("moments", model, whole.moments),
        counters=of_model(model, whole.counters),
    )


def _of_model(part: str, model: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    names = {}
    for key in arrays:
        moment, _, name = key.partition("/") if part == "moments" else ("", "", key)
        if name.startswith(f"{model}/"):
            own = name.removeprefix(f"{model}/")
            names[f"{moment}/{own}" if part == "moments" else own] = key
    return Selected(arrays, names)
