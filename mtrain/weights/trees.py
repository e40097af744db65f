"""Find the named arrays in the value of a pickle: a state dict, a checkpoint around one, or a pickled module."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.arrays import Leaf, PickledArray, TorchTensor, dimensions
from mtrain.weights.dcp_pieces import SplitTensor
from mtrain.weights.pickles import Inert, Refused

T = TypeVar("T")
PARAMETER_NAMES = "StructuredToParameterName@@"
"""Key in Paddle's state dicts of the map from each array to its name inside Paddle."""
SLICES = "UnpackBigParamInfor@@"
"""Key in Paddle's files of protocol 2 and 3 that describes how arrays of a GiB and more were cut into slices."""
_AVERAGED = re.compile(r"(^|_)(ema|swa|averaged)(_|$)")
"""Matches the key of weights that were averaged over updates: ``ema``, ``params_ema``, ``ema_state_dict``, ..."""
_USUAL = ("state_dict", "model", "model_state_dict", "model_state", "module", "net", "network", "weights", "params")
"""Keys of weights in checkpoints; of several the first is taken."""
_OTHERS = re.compile(r"optim|scheduler|scaler|rng|hyper_parameters|callbacks|loops")
"""Matches keys of what a checkpoint has beside weights."""
_OF_OPTIMIZER = re.compile(r"(optimizers?|optims?)\.(state|param_groups)\.")
"""Matches the beginning of an optimizer's array in a state without dictionaries."""
_MAX_DEPTH_OF_DICTIONARIES = 8
_MAX_SETS = 64
"""Largest number of sets of weights in a checkpoint."""
MAX_ENTRIES = 200_000
"""Largest number of modules and entries in a file; a pickle can name one module many times."""
_MAX_DEPTH = 100
"""Largest depth of modules inside each other."""
MAX_NAME = 500
"""Largest number of characters of an array's full name."""


class Unclear(Refused):
    """A file holds weights, but it does not say which of them are meant."""


def weights_of(value: Any, *, key: str | None = None) -> tuple[dict[str, Leaf], str]:
    """Return the arrays by name, and a description of where in the file they were.

    A checkpoint may hold several dictionaries of arrays and modules. Averaged weights are preferred, then a usual key, then the
    only one there is; those of an optimizer never count.

    Args:
        value: The content of the file.
        key: Which of several is meant: a key, keys joined by dots, or the first part of names.

    Raises:
        Unclear: It has several sets of weights, of which none is the usual one, or none that ``key`` names.
        Refused: The value contains no weights.
    """
    if not isinstance(value, dict | Inert):
        raise Refused("no dictionary of arrays and no model; expected weights by name")
    found = {".".join(path): node for path, node in _sets_in(value, (), set())}
    if key is not None:
        return _named(found, key)
    for path in _preferred(found):
        leaves = _arrays_of(found[path])
        if leaves:
            return leaves, _describe(path, found[path])
    if isinstance(value, Inert):
        raise Refused(f"a pickled {value.kind}, which holds no weights")
    if len(found) > 1:
        sets = ", ".join(
            f"{path or 'the file itself'} ({len(_arrays_of(node))} arrays)" for path, node in list(found.items())[:8]
        )
        raise Unclear(
            f"several sets of weights: {sets}; say which one: -o model.weights_key=KEY, or mtrain weights import --key KEY"
        )
    keys = ", ".join(ascii(key)[:40] for key in list(value)[:8])
    raise Refused(f"no weights in it (it holds: {keys or 'nothing'})")


def _sets_in(node: Any, path: tuple[str, ...], visited: set[int]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each module and each dictionary with arrays, and the keys on the way to it."""
    # A pickle can name one dictionary many times, inside of each other too.
    if id(node) in visited or len(path) > _MAX_DEPTH_OF_DICTIONARIES:
        return
    visited.add(id(node))
    if isinstance(node, Inert):
        if any(_entries(node, part) for part in ("_parameters", "_buffers", "_modules")):
            yield path, node
    elif isinstance(node, dict):
        for key, item in node.items():
            # Numbers are those of parameters in an optimizer, or of parts of a list.
            if isinstance(key, str) and isinstance(item, dict | Inert) and not _OTHERS.search(key):
                yield from _sets_in(item, (*path, key), visited)
        if _state_dict(node):
            yield path, node


def _preferred(found: Mapping[str, Any]) -> list[str]:
    """Return the sets of which one is meant, the likeliest first; none if several may be."""
    if len(found) > _MAX_SETS:
        raise Refused(f"{len(found)} sets of weights; at most {_MAX_SETS}")
    likely = sorted((rank, path) for path in found if (rank := _rank(path)) is not None)
    if likely:
        # Such as the `state_dict` of a student and that of its teacher.
        is_tied = len(likely) > 1 and likely[0][0] == likely[1][0]
        return [] if is_tied else [path for _, path in likely]
    sizes = {path: len(_arrays_of(node)) for path, node in found.items()}
    if sizes.get("", 0) >= max(sizes.values(), default=0):
        return [path for path in ("",) if path in found]
    inside = [path for path in found if path]
    return inside if len(inside) == 1 else []


def _rank(path: str) -> tuple[bool, int, int] | None:
    """Return how likely weights under these keys are meant, the smaller the likelier; None: no key says so."""
    parts = path.split(".")
    said = [bool(_AVERAGED.search(part)) for part in parts]
    is_averaged, others = any(said), sum(not by and part not in _USUAL for by, part in zip(said, parts, strict=True))
    place = _USUAL.index(parts[-1]) if parts[-1] in _USUAL else len(_USUAL)
    return (not is_averaged, others, place) if is_averaged or place < len(_USUAL) else None


def _named(found: Mapping[str, Any], key: str) -> tuple[dict[str, Leaf], str]:
    """Return the set of weights that ``key`` names.

    Raises:
        Unclear: None has that name, or several have.
    """
    paths = [path for path in found if path == key] or [path for path in found if path.endswith(f".{key}")]
    paths = paths or _preferred({path: node for path, node in found.items() if path.startswith(f"{key}.")})[:1]
    if len(paths) == 1:
        return _arrays_of(found[paths[0]]), _describe(paths[0], found[paths[0]])
    if paths:
        raise Unclear(f"several sets of weights under {ascii(key)[:80]}; give one of: {', '.join(paths[:8])}")
    for path in _preferred(found) or list(found):
        if inside := part_of(_arrays_of(found[path]), key):
            return inside, f"{_describe(path, found[path])}, the part `{key}`"
    raise Unclear(
        f"no weights under {ascii(key)[:80]}; it has: {', '.join(path or 'names' for path in list(found)[:8])}"
    )


def part_of(arrays: Mapping[str, T], key: str) -> dict[str, T]:
    """Return the arrays whose names begin with ``key`` and a dot, without that."""
    return {name.removeprefix(f"{key}."): array for name, array in arrays.items() if name.startswith(f"{key}.")}


def _describe(path: str, node: Any) -> str:
    if not path:
        return f"the weights of a pickled {node.kind.name}" if isinstance(node, Inert) else "a state dict"
    averaged = any(map(_AVERAGED.search, path.split(".")))
    return f"a checkpoint, averaged weights (`{path}`)" if averaged else f"a checkpoint, its `{path}`"


def _arrays_of(node: Any) -> dict[str, Leaf]:
    return _of_module(node) if isinstance(node, Inert) else _state_dict(node)


def _state_dict(entries: Mapping[Any, Any]) -> dict[str, Leaf]:
    return {
        name: leaf
        for name, item in entries.items()
        if isinstance(name, str) and (leaf := _leaf(item)) is not None and not _OF_OPTIMIZER.match(name)
    }


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
