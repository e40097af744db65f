"""Say in a plan how many bytes each rank sends in an update, where ranks are not laid out as a mesh."""

from collections.abc import Mapping

from mtrain.core.interfaces import PlannedArray
from mtrain.core.update.recipe import is_frozen, make_recipe
from mtrain.spec.config import Loaded
from mtrain.weights.matching import EntryType
from mtrain.weights.names import COUNTER
from mtrain.weights.outline import outlines, question_of

_KIB, _MIB = 1 << 10, 1 << 20
_STATISTICS = ("running_mean", "running_var", COUNTER)


def rows(loaded: Loaded, *, size: int, on_cpu: bool) -> dict[str, str]:
    """Return the row of a plan of ``size`` ranks; none where they send nothing, or where the weights are not known."""
    if not _is_known(loaded, size=size):
        return {}
    # Only the data say how many classes there are, and a plan reads none.
    one, two = (sent_bytes(loaded, state, size=size, on_cpu=on_cpu) for state in _outlines(loaded, (1, 2)))
    if one is None or two is None:
        return {}
    each = two - one
    if not each:
        return {"sent per update": f"{_words(one)} by each rank"}
    return {"sent per update": f"{_words(one - each)} + {_words(each)} for each class, by each rank"}


def sent_bytes(loaded: Loaded, state: Mapping[str, EntryType] | None, *, size: int, on_cpu: bool) -> float | None:
    """Return what each of ``size`` ranks sends in an update; None: not known.

    Args:
        loaded: The spec.
        state: The outline of its model; None: there is none.
        size: Number of ranks.
        on_cpu: Whether it is certain that they compute on the CPU.
    """
    if state is None:
        return None
    recipe = make_recipe(loaded.spec, size=size)
    arrays = [
        PlannedArray(shape=tuple(entry.shape), trained=not is_frozen(name, recipe.frozen))
        for name, entry in state.items()
        if entry.dtype == "float32" and name.rpartition(".")[2] not in _STATISTICS
    ]
    return loaded.job.backend.sent_per_update(arrays, recipe, size=size, on_cpu=on_cpu)


def _is_known(loaded: Loaded, *, size: int) -> bool:
    """Return whether arrays can be known. In the state of a framework's own module, one weight may have several names."""
    return (
        size > 1 and loaded.script is None and not loaded.spec.parallel.is_given and not loaded.job.model_class.native
    )


def _outlines(loaded: Loaded, classes: tuple[int, ...]) -> list[dict[str, EntryType] | None]:
    return outlines([question_of(loaded.spec, classes=count) for count in classes])


def _words(count: float) -> str:
    return f"{count / _MIB:,.1f} MiB" if count >= _MIB / 10 else f"{count / _KIB:,.1f} KiB"
