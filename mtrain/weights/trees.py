"""From the value of a pickle to named arrays: state dicts, checkpoints around them, and whole modules that were pickled as objects."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.arrays import Leaf, PickledArray, TorchTensor, dimensions
from mtrain.weights.pickles import Inert, Refused

PARAMETER_NAMES = "StructuredToParameterName@@"
"""Entry of Paddle's state dicts: name of each array inside Paddle."""
SLICES = "UnpackBigParamInfor@@"
"""Entry of Paddle's files of protocol 2 and 3: how arrays of a GiB and more were cut."""
_WRAPPERS = {"ema": "averaged weights (`ema`)", "state_dict": "its `state_dict`", "model": "its `model`"}
"""Keys under which checkpoints keep weights, the preferred one first."""
_MAX_WRAPPERS = 4
"""Checkpoints inside checkpoints: how many are opened."""
_MAX_ENTRIES = 200_000
"""Modules and their entries that one file may name; a pickle can name one module many times."""
_MAX_DEPTH = 100
"""Modules inside modules."""
_MAX_NAME = 500
"""Characters of an array's full name."""


def weights_of(value: Any) -> tuple[dict[str, Leaf], str]:
    """Arrays by name, and in words where in the file they were found.

    A checkpoint may keep arrays beside its weights, such as YOLOv5's `best_fitness`; so the keys that wrap weights are
    asked before the dictionary itself is taken for a state dict.

    Raises:
        Refused: there are none.
    """
    if isinstance(value, Inert):
        return _filled(_of_module(value), value), f"the weights of a pickled {value.kind.name}"
    if not isinstance(value, dict):
        raise Refused("no dictionary of arrays and no model; expected weights by name")
    for key, words in _WRAPPERS.items():
        inside = _inside(value.get(key), depth=1)
        if inside:
            return inside, f"a checkpoint, {words}"
    flat = _state_dict(value)
    if flat:
        return flat, "a state dict"
    for key in _WRAPPERS:
        if isinstance(value.get(key), Inert):
            return _filled({}, value[key]), ""
    known = ", ".join(ascii(key)[:40] for key in list(value)[:8])
    raise Refused(f"no weights in it (it holds: {known or 'nothing'})")


def _inside(held: object, *, depth: int) -> dict[str, Leaf]:
    """The weights of a checkpoint's entry: of a module, a state dict, or another checkpoint; empty where it has none."""
    if isinstance(held, Inert):
        return _of_module(held)
    if not isinstance(held, dict) or depth > _MAX_WRAPPERS:
        return {}
    deeper = (_inside(held.get(key), depth=depth + 1) for key in _WRAPPERS)
    return next(filter(None, deeper), {}) or _state_dict(held)


def _state_dict(held: Mapping[Any, Any]) -> dict[str, Leaf]:
    return {name: leaf for name, item in held.items() if isinstance(name, str) and (leaf := _leaf(item)) is not None}


def _filled(found: dict[str, Leaf], root: Inert) -> dict[str, Leaf]:
    if not found:
        raise Refused(f"a pickled {root.kind}, which holds no weights")
    return found


def _leaf(item: object) -> Leaf | None:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):  # Paddle: (name inside Paddle, array)
        item = item[1]
    return item if isinstance(item, PickledArray | TorchTensor) else None


def _of_module(root: Inert) -> dict[str, Leaf]:
    """Parameters and persistent buffers of a pickled ``torch.nn.Module``, in the order of its state dict."""
    found: dict[str, Leaf] = {}
    todo, entries = [("", root, 0)], 0
    while todo:
        prefix, module, depth = todo.pop()
        parts = [_entries(module, part) for part in ("_parameters", "_buffers", "_modules")]
        passed_over = set(_texts(module.state.get("_non_persistent_buffers_set")))
        entries += 1 + len(passed_over) + sum(map(len, parts))
        _check_tree(entries=entries, depth=depth, names=[prefix + name for part in parts for name, _ in part])
        for part, without in zip(parts[:2], (set(), passed_over), strict=True):
            leaves = ((name, _leaf(item)) for name, item in part if name not in without)
            found |= {prefix + name: leaf for name, leaf in leaves if leaf is not None}
        children = [(f"{prefix}{name}.", item, depth + 1) for name, item in parts[2] if isinstance(item, Inert)]
        todo += reversed(children)
    return found


def _check_tree(*, entries: int, depth: int, names: Sequence[str]) -> None:
    """A pickle of a few bytes can describe modules without end; no network has so many, so deep or such names."""
    if entries > _MAX_ENTRIES:
        raise Refused(f"modules with more than {_MAX_ENTRIES} entries in all")
    if depth > _MAX_DEPTH:
        raise Refused(f"modules nested deeper than {_MAX_DEPTH}")
    if any(len(name) > _MAX_NAME for name in names):
        raise Refused(f"an array or module whose name is longer than {_MAX_NAME} characters")


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def _entries(module: Inert, part: str) -> list[tuple[str, Any]]:
    held = module.state.get(part)
    return [(name, item) for name, item in held.items() if isinstance(name, str)] if isinstance(held, dict) else []


def joined(arrays: Mapping[str, Array], slices: object) -> dict[str, Array]:
    """``arrays`` with those that Paddle cut put together again.

    Args:
        slices: the ``SLICES`` entry: name -> ``OriginShape`` and names of the ``slices``.

    Raises:
        Refused: the slices do not make up the shape.
    """
    if not isinstance(slices, dict):
        return dict(arrays)
    left = dict(arrays)
    for name, entry in slices.items():
        given, parts = (entry.get("OriginShape"), entry.get("slices")) if isinstance(entry, dict) else (None, None)
        shape, names = dimensions(given), _texts(parts)
        if not isinstance(name, str) or not names or len(set(names)) != len(names):
            raise Refused(f"{SLICES}: an entry with an unknown content")
        pieces = [left.pop(part).reshape(-1) for part in names if part in left]
        if len(pieces) != len(names) or sum(piece.size for piece in pieces) != math.prod(shape):
            raise Refused(f"{SLICES}: the slices of {name[:80]} do not make up its shape")
        left[name] = np.concatenate(pieces).reshape(shape)
    return left
