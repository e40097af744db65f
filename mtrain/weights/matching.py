"""Arrays of a file against the names, shapes and types of a model: what is taken, what is not, and why."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mtrain.core.interfaces import Array, Published
from mtrain.errors import CheckpointError, SpecError
from mtrain.weights.names import COUNTER, is_matrix, neutral_names
from mtrain.weights.reading import Weights

_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One entry of a model's state."""

    shape: tuple[int, ...]
    dtype: str

    def scaled(self, two: "Wanted", classes: int) -> "Wanted":
        """This entry, of a model for one class, for ``classes``; ``two`` is the same entry for two."""
        pairs = zip(self.shape, two.shape, strict=True)
        return Wanted(shape=tuple(a + (classes - 1) * (b - a) for a, b in pairs), dtype=self.dtype)


@dataclass(kw_only=True, slots=True)
class Match:
    """What became of every entry of the model and of every array of the file."""

    file: Weights
    taken: dict[str, Array] = field(default_factory=dict)
    """Neutral name -> array in the model's type."""
    counters: list[str] = field(default_factory=list)
    """Entries that such files never hold; they keep their start values, and nothing is lost."""
    kept: list[str] = field(default_factory=list)
    """Entries that come from this job's data and differ from the file's."""
    of_classes: list[str] = field(default_factory=list)
    """Entries of another shape because the number of classes differs."""
    reshaped: list[str] = field(default_factory=list)
    """Entries of another shape for another reason."""
    missing: list[str] = field(default_factory=list)
    """Entries that the file does not have."""
    inexact: list[str] = field(default_factory=list)
    """Entries of whole numbers for which the file has others."""
    unused: list[str] = field(default_factory=list)
    """Names of the file that the model does not have."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Of entries that do not fit: shape in the file, shape here."""
    prefix: str = ""
    """What was put before the file's names."""

    @property
    def left(self) -> list[str]:
        """Entries of the model that keep their start values although a file of this model would have them."""
        return [*self.of_classes, *self.reshaped, *self.missing, *self.inexact]

    @property
    def share(self) -> float:
        """Arrays taken / arrays of the file."""
        return len(self.taken) / max(len(self.file.arrays), 1)

    @property
    def folded(self) -> bool:
        """Whether the file's BatchNorms were folded into its convolutions: no statistics, and biases that the model lacks."""
        statistics = {name for name in self.missing if name.endswith(".running_mean")}
        held = {*self.taken, *self.of_classes, *self.reshaped}
        biases = (name.removesuffix("bias") for name in self.unused if name.endswith(".bias"))
        return (
            bool(statistics) and "running_mean" not in _last_parts(held) and any(b + "weight" in held for b in biases)
        )

    def summary(self) -> str:
        """One sentence."""
        total = len(self.taken) + len(self.counters) + len(self.kept) + len(self.left)
        as_part = f", as `{self.prefix.rstrip('.')}` of the model" if self.prefix else ""
        return f"{self.file.path} ({self.file.told}): {len(self.taken)} of {total} arrays taken{as_part}"

    def warnings(self) -> list[str]:
        """One sentence for each reason for which something was not taken."""
        reasons = (
            (self.of_classes, "the number of classes differs, so the head keeps its start values"),
            (self.reshaped, "of another shape in the file, so start values stay"),
            (self.missing, "not in the file, so start values stay"),
            (self.inexact, "no whole numbers in the file, so start values stay"),
            (self.kept, "taken from this job's data, not from the file"),
            (self.unused, "not used, because the model has no such names"),
        )
        return [f"{reason} ({_counted(names)}): {self._listed(names)}" for names, reason in reasons if names]

    def _listed(self, names: Sequence[str]) -> str:
        shown = [name + self._shape_of(name) for name in names[:_SHOWN]]
        return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

    def _shape_of(self, name: str) -> str:
        there, here = self.shapes.get(name, ((), ()))
        return f" {there} there, {here} here" if there != here else ""


def match(
    file: Weights, wanted: Mapping[str, Wanted], published: Published, *, own: Mapping[str, Array] | None = None
) -> Match:
    """Compare by neutral name and shape.

    Args:
        file: what was read.
        wanted: the model's state.
        published: what the model says of its published files.
        own: start values of a job that trains: where those that come from its data differ from the file's, they stay.

    Raises:
        CheckpointError: two names of the file mean the same.
    """
    given, prefix = _placed(neutral_names(file.arrays), wanted)
    transposed = file.layout == "paddle" and not _as_here(given, wanted)
    result = Match(file=file, prefix=prefix, unused=[name for name in given if name not in wanted])
    for name, entry in wanted.items():
        array = given.get(name)
        if array is not None and transposed and is_matrix(name, array):
            array = array.T
        if array is None:
            (result.counters if _never_held(name, file, published) else result.missing).append(name)
        elif array.shape != entry.shape:
            result.shapes[name] = (array.shape, entry.shape)
            of_classes = any(re.search(pattern, name) for pattern in published.per_class)
            (result.of_classes if of_classes else result.reshaped).append(name)
        else:
            _take(result, name, array, np.dtype(entry.dtype), own if _is_data(name, published) else None)
    return result


def _take(result: Match, name: str, array: Array, dtype: np.dtype[np.generic], own: Mapping[str, Array] | None) -> None:
    cast = array.astype(dtype)
    if dtype.kind in "iub" and array.dtype.kind == "f" and not np.array_equal(cast, array):
        result.inexact.append(name)
    elif own is not None and not np.array_equal(own[name], cast):
        result.kept.append(name)
    else:
        result.taken[name] = cast


def wanted_of(arrays: Mapping[str, Array]) -> dict[str, Wanted]:
    """The description of a model whose state is ``arrays``."""
    return {name: Wanted(shape=tuple(array.shape), dtype=str(array.dtype)) for name, array in arrays.items()}


def refuse_folded(found: Match) -> Match:
    """``found``, unless its BatchNorms were folded: the statistics are lost, so nothing can be trained or scored with it.

    Raises:
        CheckpointError: they were.
    """
    if not found.folded:
        return found
    raise CheckpointError(
        f"{found.file.path} ({found.file.told}): its BatchNorm layers were folded into the convolutions, as YOLOv5's "
        "`model.fuse()` and its export for inference do, and that cannot be undone; give the file that training saved "
        "(YOLOv5: weights/best.pt or last.pt), or save the model before it is fused"
    )


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def refuse_nothing(found: Match, *, hint: str = "") -> Match:
    """``found``, unless nothing fits.

    Raises:
        SpecError: nothing does.
    """
    if found.taken:
        return found
    raise SpecError(
        f"model.weights: no array of {found.file.path} ({found.file.told}) fits the model by name and shape"
        + (hint or "; is it of another model?")
    )


def _placed(given: dict[str, Array], wanted: Mapping[str, Wanted]) -> tuple[dict[str, Array], str]:
    """``given`` with the prefix that makes most names known: a file may hold one part of the model, such as the backbone."""
    prefixes = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in wanted if "." in name)]
    known = Counter({prefix: sum(prefix + name in wanted for name in given) for prefix in prefixes})
    best = max(prefixes, key=lambda prefix: known[prefix])
    return {best + name: array for name, array in given.items()}, best


def _as_here(given: Mapping[str, Array], wanted: Mapping[str, Wanted]) -> bool:
    """Whether the matrices lie as they do here: one that is not square shows it."""
    return any(
        is_matrix(name, array) and name in wanted and array.shape == wanted[name].shape != array.shape[::-1]
        for name, array in given.items()
    )


def _never_held(name: str, file: Weights, published: Published) -> bool:
    counter = name.rpartition(".")[2] == COUNTER and not any(other.endswith(COUNTER) for other in file.arrays)
    return counter or any(re.search(pattern, name) for pattern in published.left_out)


def _is_data(name: str, published: Published) -> bool:
    return any(re.search(pattern, name) for pattern in published.of_data)


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} array{'s' if len(names) != 1 else ''}"
