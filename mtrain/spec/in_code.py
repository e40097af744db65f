"""Values of a spec that are written in Python, converted to those that a YAML file has."""

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.yaml_reader import Path

MAX_DEPTH = 100
"""Largest number of mappings and lists inside each other; one that contains itself has no end."""


def plain(value: Any, *, where: str, path: Path = ()) -> Any:
    """Return a value as YAML would have given it: tuples as lists, paths as text, numbers of numpy as Python's.

    ``where``: name of the argument, for messages; ``path``: place of the value in it.

    Raises:
        SpecError: the value, or one inside it, is of a kind that YAML does not have.
    """
    if len(path) > MAX_DEPTH:
        raise SpecError(f"{where}: nested more than {MAX_DEPTH} deep; does a value contain itself?")
    if value is None or isinstance(value, bool):
        return value
    # Makes plain text of a subclass, such as numpy's.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_key(key, where, path): plain(item, where=where, path=(*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where=where, path=(*path, number)) for number, item in enumerate(value)]
    raise SpecError(f"{_place(where, path)}: {_refusal(value)}")


def _key(key: Any, where: str, path: Path) -> str:
    if not isinstance(key, str):
        raise SpecError(f"{_place(where, path)}: given the key {key!r}, expected keys that are text")
    return str(key)


def _place(where: str, path: Path) -> str:
    return " ".join(part for part in (where, ".".join(map(str, path))) if part)


def _refusal(value: Any) -> str:
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return (
            f"given {name}, which other processes cannot import from here; write it into a file and name both: "
            f"'./FILE.py:{name}'"
        )
    return f"given an object of type {type(value).__name__}, expected text, a number, True or False, None, a list or a dict"
