"""From the value of a pickle to named arrays: state dicts, checkpoints around them, and whole modules that were pickled as objects."""

import math
from collections.abc import Mapping
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
_MAX_MODULES = 200_000
_MAX_DEPTH = 100


def weights_of(value: Any) -> tuple[dict[str, Leaf], str]:
    """Arrays by name, and in words where in the file they were found.

    Raises:
        Refused: there are none.
    """
    if isinstance(value, Inert):
        return _of_module(value), f"the weights of a pickled {value.kind.name}"
    if not isinstance(value, dict):
        raise Refused("no dictionary of arrays and no model; expected weights by name")
    flat = {name: leaf for name, item in value.items() if isinstance(name, str) and (leaf := _leaf(item)) is not None}
    if flat:
        return flat, "a state dict"
    for key, words in _WRAPPERS.items():
        inner = value.get(key)
        if isinstance(inner, Inert):
            return _of_module(inner), f"a checkpoint, {words}"
        if isinstance(inner, dict) and any(_leaf(item) is not None for item in inner.values()):
            return weights_of(inner)[0], f"a checkpoint, {words}"
    known = ", ".join(ascii(key)[:40] for key in list(value)[:8])
    raise Refused(f"no weights in it (it holds: {known or 'nothing'})")


def _leaf(item: object) -> Leaf | None:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):  # Paddle: (name inside Paddle, array)
        item = item[1]
    return item if isinstance(item, PickledArray | TorchTensor) else None


def _of_module(root: Inert) -> dict[str, Leaf]:
    """Parameters and persistent buffers of a pickled ``torch.nn.Module``, in the order of its state dict."""
    found: dict[str, Leaf] = {}
    todo, visited = [("", root, 0)], 0
    while todo:
        prefix, module, depth = todo.pop()
        visited += 1
        if visited > _MAX_MODULES or depth > _MAX_DEPTH:
            raise Refused(f"more than {_MAX_MODULES} modules, or modules nested deeper than {_MAX_DEPTH}")
        hidden = module.state.get("_non_persistent_buffers_set")
        passed_over = set(_texts(hidden))
        for part in ("_parameters", "_buffers"):
            for name, item in _entries(module, part):
                leaf = _leaf(item)
                if leaf is not None and not (part == "_buffers" and name in passed_over):
                    found[prefix + name] = leaf
        children = [
            (f"{prefix}{name}.", m, depth + 1) for name, m in _entries(module, "_modules") if isinstance(m, Inert)
        ]
        todo += reversed(children)
    if not found:
        raise Refused(f"a pickled {root.kind}, which holds no weights")
    return found


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
