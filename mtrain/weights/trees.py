"""Find the named arrays in the value of a pickle: a state dict, a checkpoint around one, or a pickled module."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.arrays import Leaf, PickledArray, TorchTensor, dimensions
from mtrain.weights.dcp_pieces import SplitTensor
from mtrain.weights.pickles import Inert, Refused

PARAMETER_NAMES = "StructuredToParameterName@@"
"""Key in Paddle's state dicts of the map from each array to its name inside Paddle."""
SLICES = "UnpackBigParamInfor@@"
"""Key in Paddle's files of protocol 2 and 3 that describes how arrays of a GiB and more were cut into slices."""
WRAPPERS = {"ema": "averaged weights (`ema`)", "state_dict": "its `state_dict`", "model": "its `model`"}
"""Maps a key under which checkpoints keep weights to its description; the preferred key comes first."""
_MAX_WRAPPERS = 4
"""Largest number of checkpoints inside each other that are opened."""
MAX_ENTRIES = 200_000
"""Largest number of modules and entries in a file; a pickle can name one module many times."""
_MAX_DEPTH = 100
"""Largest depth of modules inside each other."""
MAX_NAME = 500
"""Largest number of characters of an array's full name."""


def weights_of(value: Any) -> tuple[dict[str, Leaf], str]:
    """Return the arrays by name, and a description of where in the file they were.

    Raises:
        Refused: The value contains no weights.
    """
    if isinstance(value, Inert):
        return _fill(_of_module(value), value), f"the weights of a pickled {value.kind.name}"
    if not isinstance(value, dict):
        raise Refused("no dictionary of arrays and no model; expected weights by name")
    # Before the dictionary itself is read as a state dict: a checkpoint may
    # contain other arrays beside its weights, such as YOLOv5's `best_fitness`.
    for key, words in WRAPPERS.items():
        inside = _inside(value.get(key), depth=1)
        if inside:
            return inside, f"a checkpoint, {words}"
    flat = _state_dict(value)
    if flat:
        return flat, "a state dict"
    for key in WRAPPERS:
        if isinstance(value.get(key), Inert):
            return _fill({}, value[key]), ""
    keys = ", ".join(ascii(key)[:40] for key in list(value)[:8])
    raise Refused(f"no weights in it (it holds: {keys or 'nothing'})")


def _inside(entry: object, *, depth: int) -> dict[str, Leaf]:
    """Return the weights of a checkpoint's entry (a module, a state dict or a checkpoint); empty if it has none."""
    if isinstance(entry, Inert):
        return _of_module(entry)
    if not isinstance(entry, dict) or depth > _MAX_WRAPPERS:
        return {}
    deeper = (_inside(entry.get(key), depth=depth + 1) for key in WRAPPERS)
    return next(filter(None, deeper), {}) or _state_dict(entry)


def _state_dict(entries: Mapping[Any, Any]) -> dict[str, Leaf]:
    return {name: leaf for name, item in entries.items() if isinstance(name, str) and (leaf := _leaf(item)) is not None}


def _fill(leaves: dict[str, Leaf], root: Inert) -> dict[str, Leaf]:
    if not leaves:
        raise Refused(f"a pickled {root.kind}, which holds no weights")
    return leaves


def _leaf(item: object) -> Leaf | None:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):  # Paddle: (name inside Paddle, array)
        item = item[1]
    return item if isinstance(item, PickledArray | TorchTensor | SplitTensor) else None


def _of_module(root: Inert) -> dict[str, Leaf]:
    """Return parameters and persistent buffers of a pickled ``torch.nn.Module``, in the order of its state dict."""
    leaves_by_name: dict[str, Leaf] = {}
    pending, entries = [("", root, 0)], 0
    while pending:
        prefix, module, depth = pending.pop()
        parts = [_entries(module, part) for part in ("_parameters", "_buffers", "_modules")]
        passed_over = set(_texts(module.state.get("_non_persistent_buffers_set")))
        entries += 1 + len(passed_over) + sum(map(len, parts))
        _check_tree(entries=entries, depth=depth, names=[prefix + name for part in parts for name, _ in part])
        for part, excluded in zip(parts[:2], (set(), passed_over), strict=True):
            leaves = ((name, _leaf(item)) for name, item in part if name not in excluded)
            leaves_by_name |= {prefix + name: leaf for name, leaf in leaves if leaf is not None}
        children = [(f"{prefix}{name}.", item, depth + 1) for name, item in parts[2] if isinstance(item, Inert)]
        # A stack and no recursion, which a few bytes could make deep;
        # reversed, so that the order is that of the state dict.
        pending += reversed(children)
    return leaves_by_name


def _check_tree(*, entries: int, depth: int, names: Sequence[str]) -> None:
    """Refuse more modules, deeper nesting or longer names than any network has; a few bytes can describe such trees."""
    if entries > MAX_ENTRIES:
        raise Refused(f"modules with more than {MAX_ENTRIES} entries in all")
    if depth > _MAX_DEPTH:
        raise Refused(f"modules nested deeper than {_MAX_DEPTH}")
    if any(len(name) > MAX_NAME for name in names):
        raise Refused(f"an array or module whose name is longer than {MAX_NAME} characters")


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _entries(module: Inert, part: str) -> list[tuple[str, Any]]:
    entries = module.state.get(part)
    return (
        [(name, item) for name, item in entries.items() if isinstance(name, str)] if isinstance(entries, dict) else []
    )


def join_slices(arrays: Mapping[str, Array], slices: object) -> dict[str, Array]:
    """Join the arrays that Paddle has cut into slices; return all arrays.

    Args:
        arrays: All arrays of the file.
        slices: The ``SLICES`` entry, which maps a name to its ``OriginShape`` and the names of its ``slices``.

    Raises:
        Refused: The slices do not add up to the shape.
    """
    if not isinstance(slices, dict):
        return dict(arrays)
    result = dict(arrays)
    for name, entry in slices.items():
        raw_shape, parts = (entry.get("OriginShape"), entry.get("slices")) if isinstance(entry, dict) else (None, None)
        shape, names = dimensions(raw_shape), _texts(parts)
        if not isinstance(name, str) or not names or len(set(names)) != len(names):
            raise Refused(f"{SLICES}: an entry with an unknown content")
        pieces = [result.pop(part).reshape(-1) for part in names if part in result]
        if len(pieces) != len(names) or sum(piece.size for piece in pieces) != math.prod(shape):
            raise Refused(f"{SLICES}: the slices of {name[:80]} do not make up its shape")
        result[name] = np.concatenate(pieces).reshape(shape)
    return result
