"""What became of every key of a foreign config: carried over, the same anyway, or not carried over, and why.

A translation reads values through a ``Book`` and enters each one once; whatever it never entered has no counterpart.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import SpecError
from mtrain.importers.documents import Document, Place
from mtrain.spec.yaml_reader import Path, flow

NO_COUNTERPART = "no counterpart"
_SHOWN = 100
"""Characters of a value in messages and comments."""
_LARGEST = 1e300
_PLAIN = re.compile(r"^[\w-]+$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the foreign config."""

    place: Place
    key: str
    value: Any
    remark: str
    """Carried over: what it became; not carried over: why."""

    def __str__(self) -> str:
        return f"{self.place} {self.key}: {shown(self.value)}"


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the spec, and where it came from in words."""

    value: Any
    source: str
    stated: bool = True
    """Whether a file says so; else it follows from what the project does where nothing is said."""


@dataclass(slots=True)
class Book:
    """The keys of one document and the values of the spec that they became, in the order of entering."""

    document: Document
    values: dict[str, Given] = field(default_factory=dict)
    """By dotted path in the spec."""
    carried: list[Entry] = field(default_factory=list)
    dropped: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _entered: set[Path] = field(default_factory=set)

    def get(self, source: str | Path, default: Any = None) -> Any:
        """The value at ``source`` (dotted text or a path); ``default`` where it is not given. Enters nothing."""
        path = path_of(source)
        return self.document.get(path) if self.document.has(path) else default

    def has(self, source: str | Path) -> bool:
        """Whether a value, null included, is given at ``source``."""
        return self.document.has(path_of(source))

    def put(self, target: str, value: Any, source: str | Path) -> None:
        """Give a value of the spec that follows from ``source``, which is entered elsewhere."""
        self.values[target] = Given(value, self.where(source), stated=self.has(source))

    def carry(self, source: str | Path, target: str, value: Any = ..., *, remark: str = "") -> None:
        """``source`` becomes ``target``; with ``value``, changed. Nothing happens where it is not given or was entered."""
        path = path_of(source)
        if self._entered.issuperset(self.document.leaves(path)):
            return
        value = self.document.get(path) if value is ... else value
        self.put(target, value, path)
        self._enter(path, self.carried, f"{target}: {shown(value)}{f' ({remark})' if remark else ''}")

    def same(self, source: str | Path, remark: str) -> None:
        """What ``source`` asks for is what mtrain does without being told."""
        self._enter(path_of(source), self.carried, remark)

    def bare(self, source: str | Path, remark: str) -> None:
        """As ``same``, where ``source`` has no keys of its own: those below it are entered one by one."""
        if not self.get(source):
            self.same(source, remark)

    def drop(self, source: str | Path, reason: str = NO_COUNTERPART) -> None:
        """``source`` is not carried over."""
        self._enter(path_of(source), self.dropped, reason)

    def fixed(self, source: str | Path, value: Any, *, what: str) -> None:
        """``source`` cannot be chosen in mtrain, where it is always ``value``: ``what`` says of what.

        Nothing happens where it is not given.
        """
        if equal(self.get(source), value):
            self.same(source, f"always so in {what}")
        else:
            self.drop(source, f"fixed at {shown(value)} in {what}")

    def assume(self, target: str, value: Any, why: str) -> None:
        """Give a value of the spec that no file states."""
        self.values[target] = Given(value, why, stated=False)

    def otherwise(self, target: str, value: Any, why: str) -> None:
        """As ``assume``, where nothing was given yet."""
        if target not in self.values:
            self.assume(target, value, why)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def where(self, source: str | Path) -> str:
        """``file:line key``; of a key that is not given, the nearest place around it."""
        path = path_of(source)
        absent = "" if self.has(path) else ", not given: its default"
        return f"{self.document.place(path)} {name_of(path)}{absent}"

    def refuse(self, source: str | Path, expected: str) -> SpecError:
        """The error for a value that ends the import; ``expected`` goes on behind it."""
        path = path_of(source)
        return SpecError(f"{self.where(path)}: given {shown(self.document.get(path))}, {expected}")

    def number(self, source: str | Path, default: float) -> float:
        """The number at ``source``. Raises: ``SpecError`` where it is none."""
        value = self.get(source, default)
        if not is_number(value):
            raise self.refuse(source, "expected a number")
        return float(value) if isinstance(value, float) else int(value)

    def integer(self, source: str | Path, default: int) -> int:
        """The integer at ``source``. Raises: ``SpecError`` where it is none."""
        value = self.number(source, default)
        if value != int(value):
            raise self.refuse(source, "expected an integer")
        return int(value)

    def word(self, source: str | Path, default: str) -> str:
        """The text at ``source``. Raises: ``SpecError`` where it is none."""
        value = self.get(source, default)
        if not isinstance(value, str):
            raise self.refuse(source, "expected a word")
        return value

    def section(self, source: str | Path) -> dict[str, Any]:
        """The keys at ``source``, none where it is null or missing. Raises: ``SpecError`` for anything else."""
        value = self.get(source)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(source, "expected `key: value` lines")
        return value or {}

    def truth(self, source: str | Path, *, default: bool) -> bool:
        """Whether ``source`` is true. Raises: ``SpecError`` where it is neither true nor false."""
        value = self.get(source, default)
        if not isinstance(value, bool):
            raise self.refuse(source, "expected true or false")
        return value

    def close(self) -> None:
        """Everything that was never entered has no counterpart."""
        self.drop(())

    def _enter(self, path: Path, into: list[Entry], remark: str) -> None:
        """Enter the values at and below ``path`` that are not entered yet."""
        for leaf in self.document.leaves(path):
            if leaf not in self._entered:
                self._entered.add(leaf)
                place, value = self.document.place(leaf), self.document.get(leaf)
                into.append(Entry(place=place, key=name_of(leaf), value=value, remark=remark))


def path_of(source: str | Path) -> Path:
    """Dotted text as a path; a path is itself."""
    return tuple(source.split(".")) if isinstance(source, str) else source


def name_of(path: Path) -> str:
    """A path for people, on one line whatever the keys hold."""
    return ".".join(part if _PLAIN.match(part) else flow(part) for part in map(str, path))


def shown(value: Any) -> str:
    """A value for people, on one line and not too long."""
    text = flow(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def is_number(value: Any) -> bool:
    """Whether a value is a number that arithmetic can take."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def equal(value: Any, other: Any) -> bool:
    """Whether two plain values say the same: ``1`` and ``1.0`` do, ``1`` and ``true`` do not."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(equal, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
