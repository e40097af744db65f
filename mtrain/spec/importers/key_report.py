"""Record the fate of every key of a foreign config: carried over, the same anyway, or not carried over, and why.

A translation reads values through a ``Book`` and enters each one once; keys that it never entered have no counterpart.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.importers.documents import Document, FilePlace
from mtrain.spec.yaml_reader import Path, flow

NO_COUNTERPART = "no counterpart"
_SHOWN = 100
"""Largest number of characters of a value in messages and comments."""
_LARGEST = 1e300
_PLAIN = re.compile(r"^[\w-]+\Z")


@dataclass(frozen=True, slots=True)
class ReportedKey:
    """One key of the foreign config."""

    place: FilePlace
    key: str
    value: Any
    remark: str
    """Result of a key that is carried over, or reason why it is not."""

    def __str__(self) -> str:
        return f"{self.place} {self.key}: {show_value(self.value)}"


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the spec, and its origin in words."""

    value: Any
    source: str
    stated: bool = True
    """Whether a file states the value; otherwise it is the foreign project's default."""


@dataclass(slots=True)
class Book:
    """The keys of one document and the resulting values of the spec, in the order in which they were entered."""

    document: Document
    values: dict[str, Given] = field(default_factory=dict)
    """Values by dotted path in the spec."""
    carried: list[ReportedKey] = field(default_factory=list)
    dropped: list[ReportedKey] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _entered: set[Path] = field(default_factory=set)

    def get(self, source: str | Path, default: Any = None) -> Any:
        """Return the value at ``source`` (dotted text or a path), or ``default`` if there is none. Enters nothing."""
        path = path_of(source)
        return self.document.get(path) if self.document.has(path) else default

    def has(self, source: str | Path) -> bool:
        """Return whether ``source`` has a value; null counts as one."""
        return self.document.has(path_of(source))

    def put(self, target: str, value: Any, source: str | Path) -> None:
        """Set a value of the spec that follows from ``source``, which is entered elsewhere."""
        self.values[target] = Given(value, self.where(source), stated=self.has(source))

    def carry(self, source: str | Path, target: str, value: Any = ..., *, remark: str = "") -> None:
        """Carry ``source`` over to ``target``, changed to ``value`` if given. A missing or already entered ``source``
        is skipped."""
        path = path_of(source)
        # Also for a missing source, which has no leaves.
        if self._entered.issuperset(self.document.leaves(path)):
            return
        value = self.document.get(path) if value is ... else value
        self.put(target, value, path)
        self._enter(path, self.carried, f"{target}: {show_value(value)}{f' ({remark})' if remark else ''}")

    def settle(self, source: str | Path, target: str, value: Any, *, remark: str = "") -> None:
        """Set a value of the spec that follows from ``source``, given or not, and report ``source`` as carried over.

        ``remark``: empty: the target.
        """
        self.put(target, value, source)
        self.same(source, remark or target)

    def same(self, source: str | Path, remark: str) -> None:
        """Report ``source``, and all keys below it, as carried over: it requests what mtrain does anyway."""
        self._enter(path_of(source), self.carried, remark)

    def bare(self, source: str | Path, remark: str) -> None:
        """Like ``same``, if ``source`` has no keys below it; otherwise the caller reports those one by one."""
        if not self.get(source):
            self.same(source, remark)

    def drop(self, source: str | Path, reason: str = NO_COUNTERPART) -> None:
        """Report ``source`` as not carried over; the import goes on."""
        self._enter(path_of(source), self.dropped, reason)

    def expect_fixed(self, source: str | Path, value: Any, *, what: str) -> None:
        """Report a ``source`` that cannot be chosen in mtrain, where it always is ``value``.

        Another value is reported as not carried over, and the import goes on. A missing ``source`` is skipped.
        ``what`` names the part of mtrain.
        """
        if equal(self.get(source), value):
            self.same(source, f"always so in {what}")
        else:
            self.drop(source, f"fixed at {show_value(value)} in {what}")

    def require(self, source: str | Path, value: Any, *, what: str) -> None:
        """Like ``expect_fixed``, where another value would change the network. Raises: ``SpecError`` for one."""
        if self.has(source) and not equal(self.get(source), value):
            raise self.refuse(source, f"expected {show_value(value)}: {what} has no other")
        self.same(source, f"always so in {what}")

    def assume(self, target: str, value: Any, why: str) -> None:
        """Set a value of the spec that no file states."""
        self.values[target] = Given(value, why, stated=False)

    def otherwise(self, target: str, value: Any, why: str) -> None:
        """Like ``assume``, if the value is not set yet."""
        if target not in self.values:
            self.assume(target, value, why)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def where(self, source: str | Path) -> str:
        """Return ``file:line key``; for a missing key, the nearest place around it."""
        path = path_of(source)
        absent = "" if self.has(path) else ", not given: its default"
        return f"{self.document.place(path)} {name_of(path)}{absent}"

    def refuse(self, source: str | Path, expected: str) -> SpecError:
        """Return the error for a value that ends the import; ``expected`` is appended to the message."""
        path = path_of(source)
        return SpecError(f"{self.where(path)}: given {show_value(self.document.get(path))}, {expected}")

    def number(self, source: str | Path, default: float) -> float:
        """Return the number at ``source``. Raises: ``SpecError`` if it is not a number."""
        value = self.get(source, default)
        if not is_number(value):
            raise self.refuse(source, "expected a number")
        return float(value) if isinstance(value, float) else int(value)

    def integer(self, source: str | Path, default: int) -> int:
        """Return the integer at ``source``. Raises: ``SpecError`` if it is not an integer."""
        value = self.number(source, default)
        if value != int(value):
            raise self.refuse(source, "expected an integer")
        return int(value)

    def word(self, source: str | Path, default: str) -> str:
        """Return the text at ``source``. Raises: ``SpecError`` if it is not text."""
        value = self.get(source, default)
        if not isinstance(value, str):
            raise self.refuse(source, "expected a word")
        return value

    def section(self, source: str | Path) -> dict[str, Any]:
        """Return the keys at ``source``; empty if it is null or missing. Raises: ``SpecError`` for anything else."""
        value = self.get(source)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(source, "expected `key: value` lines")
        return value or {}

    def truth(self, source: str | Path, *, default: bool) -> bool:
        """Return the boolean at ``source``. Raises: ``SpecError`` if it is neither true nor false."""
        value = self.get(source, default)
        if not isinstance(value, bool):
            raise self.refuse(source, "expected true or false")
        return value

    def find_left(self) -> list[Path]:
        """Return the paths of the values that are not entered yet."""
        return [leaf for leaf in self.document.leaves() if leaf not in self._entered]

    def close(self) -> None:
        """Enter everything that is left as having no counterpart."""
        self.drop(())

    def _enter(self, path: Path, into: list[ReportedKey], remark: str) -> None:
        """Enter the values at and below ``path`` that are not entered yet."""
        for leaf in self.document.leaves(path):
            if leaf not in self._entered:
                self._entered.add(leaf)
                place, value = self.document.place(leaf), self.document.get(leaf)
                into.append(ReportedKey(place=place, key=name_of(leaf), value=value, remark=remark))


def path_of(source: str | Path) -> Path:
    """Convert dotted text to a path; a path is returned unchanged."""
    return tuple(source.split(".")) if isinstance(source, str) else source


def name_of(path: Path) -> str:
    """Format a path for people, on one line whatever its keys contain."""
    return ".".join(part if _PLAIN.match(part) else flow(part) for part in map(str, path))


def show_value(value: Any) -> str:
    """Format a value for people, on one line of limited length."""
    text = flow(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def is_number(value: Any) -> bool:
    """Return whether a value is a number with which one can compute."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def equal(value: Any, other: Any) -> bool:
    """Return whether two plain values are equal: ``1`` equals ``1.0``, but not ``true``."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        # YAML has lists where the tables here have tuples.
        return len(value) == len(other) and all(map(equal, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
