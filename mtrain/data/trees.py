"""Batches of any shape: nested tuples, lists and dicts of arrays, tensors, numbers and other values.

Backends move flat mappings of numpy arrays to the device. ``flatten`` separates a batch into such a mapping and its
structure, and ``rebuilt`` joins them again.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import DataError

Leaf = Callable[[str, Any], Any]
_FORM = attrgetter("dtype", "shape", "device")


def map_leaves(value: Any, leaf: Leaf, path: str = "") -> Any:
    """Return ``value`` with every leaf replaced by ``leaf(path, value)``; containers keep their type.

    A path is like ``0.labels``. Dataclasses and other objects are leaves.
    """
    if isinstance(value, Mapping):
        entries = {key: map_leaves(item, leaf, _join(path, key)) for key, item in value.items()}
        return entries if type(value) is dict else _like(value, entries)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(map_leaves(item, leaf, _join(path, name)) for name, item in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, leaf, _join(path, place)) for place, item in enumerate(value))
    return leaf(path, value)


def _like(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Return ``entries`` as a mapping of the same class, such as the batches of text libraries; a dict if it cannot."""
    try:
        # Any class may be given, and its constructor may raise anything.
        return type(value)(entries)  # type: ignore[call-arg]
    except Exception:
        return entries


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def as_array(value: Any) -> Array | None:
    """Return a tensor of any framework or a numpy value as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        # numpy has no bfloat16, which some data sets are stored in.
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
        return array
    return None


def flatten(batch: Any, *, floats: Any = None) -> tuple[dict[str, Array], Any]:
    """Separate a batch into its arrays by path, and a structure that holds everything else.

    ``floats``: a dtype into which arrays of floating-point numbers are converted; None keeps theirs.
    """
    arrays: dict[str, Array] = {}

    def leaf(path: str, value: Any) -> Any:
        array = as_array(value)
        if array is None or array.dtype == object or array.dtype.kind in "US":
            return value
        if floats is not None and array.dtype.kind == "f":
            array = array.astype(floats)
        arrays[path] = array
        return ArrayPlace(path)

    return arrays, map_leaves(batch, leaf)


class ArrayPlace:
    """The place of an array in the structure of a batch."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


def rebuilt(structure: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the batch with its ``tensors`` back in their places."""
    return map_leaves(structure, lambda path, value: tensors[value.path] if isinstance(value, ArrayPlace) else value)


def collate(samples: Sequence[Any]) -> Any:
    """Join samples to one batch: arrays, tensors and numbers are stacked, containers are joined entry by entry.

    Python floats become float64 and integers int64, texts and other objects lists, as in torch's default collation.

    Raises:
        DataError: samples differ in structure or shape.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        if any(not isinstance(sample, Mapping) or set(sample) != set(first) for sample in samples):
            raise DataError("samples of one batch have different keys; give a `collate` of your own")
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list | tuple):
        alike = len(set(map(type, samples))) == 1 or all(isinstance(sample, list | tuple) for sample in samples)
        if not alike or len(set(map(len, samples))) > 1:
            raise DataError("samples of one batch have different lengths; give a `collate` of your own")
        joined = [collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    if isinstance(first, bool | int | float | np.generic):
        return np.asarray(samples)
    stacked = _stacked_tensors(samples)
    if stacked is not None:
        return stacked
    arrays = [as_array(sample) for sample in samples]
    if arrays[0] is None:
        return list(samples)
    shapes = {array.shape for array in arrays if array is not None}
    if len(shapes) > 1:
        raise DataError(
            f"samples of one batch have different shapes: {', '.join(map(str, sorted(shapes)[:3]))}; make them equal, or "
            "give a `collate` of your own"
        )
    return np.stack(arrays)  # type: ignore[arg-type]


def _stacked_tensors(samples: Sequence[Any]) -> Array | None:
    """Return tensors of torch stacked, by torch itself, which takes a tenth of the time; None for anything that is not alike."""
    torch = sys.modules.get("torch")
    if torch is None or set(map(type, samples)) != {torch.Tensor} or len(set(map(_FORM, samples))) > 1:
        return None
    return as_array(torch.stack(samples))


def contents(value: Any) -> dict[str, Array]:
    """Return everything in a sample that can be compared, by path: arrays, tensors and numbers."""
    found: dict[str, Array] = {}

    def leaf(path: str, value: Any) -> Any:
        array = np.asarray(value) if isinstance(value, bool | int | float) else as_array(value)
        if array is not None and array.dtype != object:
            found[path] = array
        return value

    map_leaves(value, leaf)
    return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two samples are equal bit for bit; texts and other objects count as equal."""
    ones, others = contents(one), contents(other)
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype
        and ones[name].shape == others[name].shape
        and ones[name].tobytes() == others[name].tobytes()
        for name in ones
    )
