"""Match the arrays of a file with the names, shapes and types of a model, and report what does not fit and why."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mtrain.core.interfaces import Array, Published
from mtrain.core.network.quantising import is_range
from mtrain.errors import CheckpointError, SpecError, first_few
from mtrain.weights.names import COUNTER, is_matrix, neutral_names
from mtrain.weights.reading import Weights

_SHOWN = 4
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryType:
    """Shape and type that one entry of a model's state requires."""

    shape: tuple[int, ...]
    dtype: str

    def scale(self, two: "EntryType", classes: int) -> "EntryType":
        """Extrapolate this entry, which is that of one class, to ``classes``; ``two`` is the entry for two classes."""
        pairs = zip(self.shape, two.shape, strict=True)
        return EntryType(shape=tuple(a + (classes - 1) * (b - a) for a, b in pairs), dtype=self.dtype)


@dataclass(kw_only=True, slots=True)
class Match:
    """The result of matching: every entry of the model and every array of the file is in one of its lists."""

    file: Weights
    matched: dict[str, Array] = field(default_factory=dict)
    """Arrays of the file that fit, in the model's type, by neutral name."""
    counters: list[str] = field(default_factory=list)
    """Entries that files of this kind never contain; they keep their start values, and nothing is lost."""
    from_data: list[str] = field(default_factory=list)
    """Entries that are computed from this job's data, differ from the file's, and keep the job's value."""
    of_classes: list[str] = field(default_factory=list)
    """Entries whose shape differs because the number of classes differs."""
    reshaped: list[str] = field(default_factory=list)
    """Entries whose shape differs for another reason."""
    missing: list[str] = field(default_factory=list)
    """Entries that the file lacks although files of its format contain them; see ``counters`` for the others."""
    inexact: list[str] = field(default_factory=list)
    """Integer entries for which the file has numbers that are not integers."""
    unused: list[str] = field(default_factory=list)
    """Arrays of the file whose names the model does not have."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Maps an entry that does not fit to (shape in the file, shape in the model)."""
    prefix: str = ""
    """Prefix that was put before the file's names."""

    @property
    def left_over(self) -> list[str]:
        """Entries that keep their start values although a complete file of this model would contain them."""
        return [*self.of_classes, *self.reshaped, *self.missing, *self.inexact]

    @property
    def share(self) -> float:
        """Share of the file's arrays that fit the model."""
        return len(self.matched) / max(len(self.file.arrays), 1)

    @property
    def has_folded_norms(self) -> bool:
        """True if the file's BatchNorms were folded into its convolutions.

        Such a file has no running statistics, but biases of convolutions that the model lacks.
        """
        statistics = {name for name in self.missing if name.endswith(".running_mean")}
        present = {*self.matched, *self.of_classes, *self.reshaped}
        biases = (name.removesuffix("bias") for name in self.unused if name.endswith(".bias"))
        return (
            bool(statistics)
            and "running_mean" not in _last_parts(present)
            and any(b + "weight" in present for b in biases)
        )

    def summary(self) -> str:
        """Return one sentence on how much of the file fits."""
        total = len(self.matched) + len(self.counters) + len(self.from_data) + len(self.left_over)
        as_part = f", as `{self.prefix.rstrip('.')}` of the model" if self.prefix else ""
        return f"{self.file.path} ({self.file.description}): {len(self.matched)} of {total} arrays taken{as_part}"

    def warnings(self) -> list[str]:
        """Return one sentence for each reason for which arrays were not used."""
        reasons = (
            (self.of_classes, "the number of classes differs, so the head keeps its start values"),
            (self.reshaped, "of another shape in the file, so start values stay"),
            (self.missing, "not in the file, so start values stay"),
            (self.inexact, "no whole numbers in the file, so start values stay"),
            (self.from_data, "taken from this job's data, not from the file"),
            (self.unused, "not used, because the model has no such names"),
        )
        return [f"{reason} ({_count_arrays(names)}): {self._list_names(names)}" for names, reason in reasons if names]

    def _list_names(self, names: Sequence[str]) -> str:
        return first_few([name + self._shape_of(name) for name in names], _SHOWN)

    def _shape_of(self, name: str) -> str:
        in_file, in_model = self.shapes.get(name, ((), ()))
        return f" {in_file} there, {in_model} here" if in_file != in_model else ""


def match(
    file: Weights, required: Mapping[str, EntryType], published: Published, *, own: Mapping[str, Array] | None = None
) -> Match:
    """Match the arrays of a file with a model by neutral name and shape.

    Args:
        file: The file's arrays.
        required: The entries of the model's state.
        published: The model's description of its published files.
        own: Start values of a job that trains. Those that are computed from its data stay where they differ from the
            file's.

    Raises:
        CheckpointError: Two names of the file have the same neutral name.
    """
    arrays, prefix = find_prefix(_rename(neutral_names(file.arrays), required, published), required)
    # A matrix that is not square, and fits only as it is, shows that the file's writer has transposed none.
    transposed = file.layout == "paddle" and not _as_here(arrays, required)
    result = Match(
        file=file, prefix=prefix, unused=[name for name in arrays if name not in required and not is_range(name)]
    )
    for name, entry in required.items():
        array = arrays.get(name)
        if array is not None and transposed and is_matrix(name, array):
            array = array.T
        if array is None:
            (result.counters if _never_held(name, file, published) else result.missing).append(name)
        elif array.shape != entry.shape:
            result.shapes[name] = (array.shape, entry.shape)
            of_classes = any(re.search(pattern, name) for pattern in published.per_class)
            (result.of_classes if of_classes else result.reshaped).append(name)
        else:
            _sort_in(result, name, array, np.dtype(entry.dtype), own if _is_data(name, published) else None)
    return result


def _sort_in(
    result: Match, name: str, array: Array, dtype: np.dtype[np.generic], own: Mapping[str, Array] | None
) -> None:
    cast = array.astype(dtype)
    if dtype.kind in "iub" and array.dtype.kind == "f" and not np.array_equal(cast, array):
        result.inexact.append(name)
    # Such as anchors: those of this job's data fit its boxes, and the file's fit others.
    elif own is not None and not np.array_equal(own[name], cast):
        result.from_data.append(name)
    else:
        result.matched[name] = cast


def entry_types(arrays: Mapping[str, Array]) -> dict[str, EntryType]:
    """Return the required entries of a model whose state is ``arrays``."""
    return {name: EntryType(shape=tuple(array.shape), dtype=str(array.dtype)) for name, array in arrays.items()}


def refuse_folded(result: Match) -> Match:
    """Return ``result``, but refuse a file whose BatchNorms were folded.

    Its running statistics are lost, so the weights can neither be trained nor scored.

    Raises:
        CheckpointError: The BatchNorms were folded.
    """
    if not result.has_folded_norms:
        return result
    raise CheckpointError(
        f"{result.file.path} ({result.file.description}): its BatchNorm layers were folded into the convolutions, as "
        "YOLOv5's `model.fuse()` and its export for inference do, and that cannot be undone; give the file that training saved "
        "(YOLOv5: weights/best.pt or last.pt), or save the model before it is fused"
    )


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def refuse_nothing(result: Match) -> Match:
    """Return ``result``, but refuse a file of which nothing fits.

    Raises:
        SpecError: No array fits.
    """
    if result.matched:
        return result
    raise SpecError(
        f"model.weights: no array of {result.file.path} ({result.file.description}) fits the model by name and "
        "shape; is it of another model?"
    )


def _rename(arrays: dict[str, Array], required: Mapping[str, EntryType], published: Published) -> dict[str, Array]:
    """Return ``arrays`` under the names that the model has, see ``Published.renamed``.

    A name that it has stays, and so does its array. An array of which the model has a second name gets that, too.
    """
    if not published.renamed:
        return arrays
    result = {name: array for name, array in arrays.items() if name in required}
    for name, array in arrays.items():
        if name not in result:
            result.setdefault(_now(name, published), array)
    for name in required:
        if name not in result and _now(name, published) in result:
            result[name] = result[_now(name, published)]
    return result


def _now(name: str, published: Published) -> str:
    for pattern, replacement in published.renamed:
        name = re.sub(pattern, replacement, name)
    return name


def find_prefix(arrays: Mapping[str, T], required: Collection[str]) -> tuple[dict[str, T], str]:
    """Return ``arrays`` with the prefix under which most names match, and that prefix."""
    # A file may contain only a part of the model, such as the backbone.
    prefixes = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in required if "." in name)]
    match_counts = Counter({prefix: sum(prefix + name in required for name in arrays) for prefix in prefixes})
    best = max(prefixes, key=lambda prefix: match_counts[prefix])
    # Names may all begin with the attribute of a class around the
    # model, which is removed where more of them match without it.
    outer = _shared_start(arrays)
    if outer and sum(name.removeprefix(outer) in required for name in arrays) > match_counts[best]:
        return {name.removeprefix(outer): array for name, array in arrays.items()}, ""
    return {best + name: array for name, array in arrays.items()}, best


def _shared_start(names: Collection[str]) -> str:
    """Return the first part of all names with its dot; empty if they have different ones."""
    starts = {name.partition(".")[0] + "." for name in names}
    return starts.pop() if len(starts) == 1 and all("." in name for name in names) else ""


def _as_here(arrays: Mapping[str, Array], required: Mapping[str, EntryType]) -> bool:
    """Return whether matrices are stored as in mtrain, and not transposed; a matrix that is not square shows it."""
    return any(
        is_matrix(name, array) and name in required and array.shape == required[name].shape != array.shape[::-1]
        for name, array in arrays.items()
    )


def _never_held(name: str, file: Weights, published: Published) -> bool:
    counter = name.rpartition(".")[2] == COUNTER and not any(other.endswith(COUNTER) for other in file.arrays)
    return counter or is_range(name) or any(re.search(pattern, name) for pattern in published.left_out)


def _is_data(name: str, published: Published) -> bool:
    return any(re.search(pattern, name) for pattern in published.of_data)


def _count_arrays(names: Sequence[str]) -> str:
    return f"{len(names)} array{'s' if len(names) != 1 else ''}"
