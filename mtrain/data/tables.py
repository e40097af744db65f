"""Read columns of CSV files that people and programs have written: any usual separator, with or without a header."""

import csv
import difflib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.data.reading import text_of
from mtrain.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
"""Separators that are tried, in this order."""


@dataclass(frozen=True, slots=True)
class CsvRow:
    """The wanted fields of one line, without surrounding blanks."""

    line: int
    """Number of the line in the file, from 1."""
    fields: tuple[str, ...]


def read_columns(file: Path, wanted: Sequence[str], *, separator: str | None, remedy: str) -> list[CsvRow]:
    """Return the columns ``wanted`` of a CSV file, in that order; empty lines are left out.

    Args:
        file: A UTF-8 text file; a byte order mark is skipped.
        wanted: Names of the columns in the header, the first line.
        separator: Character between fields; None: the one that makes the wanted columns appear.
        remedy: Advice in the message if a column is missing.

    Raises:
        DataError: the file cannot be read, is no CSV file, or lacks a column; the message names the columns it has.
    """
    text = text_of(file, expected="a CSV file")
    if not text.strip():
        raise DataError(f"{file}: empty; expected a CSV file with the columns {', '.join(wanted)}")
    separators = SEPARATORS if separator is None else (separator,)
    headers = {mark: _first(text, mark) for mark in separators}
    # By the wanted columns and not by counting: a path or a label may hold any of these characters.
    for mark, header in headers.items():
        if all(name in header for name in wanted):
            places = [header.index(name) for name in wanted]
            return [_row(file, line, fields, places) for line, fields in _lines(file, text, mark)]
    raise DataError(_missing(file, wanted, max(headers.values(), key=len), remedy))


def _first(text: str, mark: str) -> list[str]:
    try:
        for fields in csv.reader(io.StringIO(text[: 1 << 20], newline=""), delimiter=mark):
            if any(field.strip() for field in fields):
                return [field.strip() for field in fields]
    except csv.Error:
        pass  # _lines names the line if this separator is the right one
    return []


def _lines(file: Path, text: str, mark: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    try:
        rows = ([field.strip() for field in fields] for fields in reader)
        filled = ((reader.line_num, fields) for fields in rows if any(fields))
        next(filled, None)  # the header
        yield from filled
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: no valid CSV ({error}); correct the line") from error


def _row(file: Path, line: int, fields: Sequence[str], places: Sequence[int]) -> CsvRow:
    if len(fields) <= max(places):
        raise DataError(
            f"{file}:{line}: {len(fields)} fields, expected at least {max(places) + 1}, as the first line has; correct it"
        )
    return CsvRow(line, tuple(fields[place] for place in places))


def _missing(file: Path, wanted: Sequence[str], header: Sequence[str], remedy: str) -> str:
    missing = [name for name in wanted if name not in header]
    near = [match for name in missing for match in difflib.get_close_matches(name, header, n=1, cutoff=0.6)]
    meant = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    return f"{file}: no column {', '.join(map(repr, missing))}; its first line has {', '.join(header)[:300]}{meant}; {remedy}"
