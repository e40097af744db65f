"""Carry a batch of any shape through a flat mapping of arrays, and back.

Backends move mappings of arrays to the device. The arrays of a batch get the names ``0``, ``1`` and so on; its nesting is
written into the name of the first one, as JSON, so that it needs no place of its own and no wait for the device.
"""

import json
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mtrain.errors import DataError

FIRST = "0 "
"""Beginning of the name that holds the nesting."""
_PLAIN = (bool, int, float, type(None))


def pack(value: Any, as_leaf: Callable[[str, Any], Any], *, where: str) -> dict[str, Any]:
    """Return the arrays or tensors of ``value`` by name, in a form for ``unpack``.

    Args:
        value: Nested dicts, lists and tuples.
        as_leaf: Maps a path and a value to the array to carry, or to None if the value is none.
        where: The value in words, for messages.

    Raises:
        DataError: it holds no array, or something that cannot be carried.
    """
    leaves: list[Any] = []
    node = _node(value, as_leaf, leaves, where, "")
    if not leaves:
        raise DataError(
            f"{where}, a {type(value).__name__}, holds no array and no tensor; return arrays, tensors or numbers"
        )
    names = [FIRST + json.dumps(node), *map(str, range(1, len(leaves)))]
    return dict(zip(names, leaves, strict=True))


def is_packed(value: Any) -> bool:
    """Return whether ``value`` is what ``pack`` made."""
    return isinstance(value, Mapping) and any(isinstance(name, str) and name.startswith(FIRST) for name in value)


def unpack(arrays: Mapping[str, Any]) -> Any:
    """Return the value from which ``pack`` made ``arrays``, with the arrays or tensors that are in them now."""
    first = next(name for name in arrays if name.startswith(FIRST))
    return _rebuilt(json.loads(first[len(FIRST) :]), lambda number: arrays[first if number == 0 else str(number)])


def _node(value: Any, as_leaf: Callable[[str, Any], Any], leaves: list[Any], where: str, path: str) -> Any:
    def inner(items: Sequence[tuple[Any, Any]]) -> Iterator[Any]:
        for key, item in items:
            yield _node(item, as_leaf, leaves, where, f"{path}.{key}" if path else str(key))

    if isinstance(value, Mapping):
        if any(not isinstance(key, str | int) for key in value):
            raise DataError(f"{where}: a dict has the key {next(iter(value))!r}; expected texts or whole numbers")
        return {"d": list(value), "v": list(inner(list(value.items())))}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "n": [type(value).__name__, *value._fields],
            "v": list(inner(list(zip(value._fields, value, strict=True)))),
        }
    if isinstance(value, list | tuple):
        return {"l" if isinstance(value, list) else "t": 0, "v": list(inner(list(enumerate(value))))}
    leaf = as_leaf(path, value)
    if leaf is not None:
        leaves.append(leaf)
        return len(leaves) - 1
    if not isinstance(value, _PLAIN):
        raise DataError(
            f"{where} holds a {type(value).__name__}{f' at {path!r}' if path else ''}; expected arrays, tensors or numbers in "
            "dicts, lists and tuples: leave it out, or turn it into numbers"
        )
    return {"c": value}


def _rebuilt(node: Any, leaf: Callable[[int], Any]) -> Any:
    if isinstance(node, int):
        return leaf(node)
    if "c" in node:
        return node["c"]
    values = [_rebuilt(item, leaf) for item in node["v"]]
    if "d" in node:
        return dict(zip(node["d"], values, strict=True))
    if "n" in node:
        name, *fields = node["n"]
        return namedtuple(name, fields)(*values)
    return values if "l" in node else tuple(values)
