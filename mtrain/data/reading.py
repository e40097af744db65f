"""What the annotation readers share: where files are, and errors that list everything at once."""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from mtrain.data.images.header import SUFFIXES, probe
from mtrain.errors import DataError
from mtrain.files import read_text

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""``all``: every picture there is; they are divided afterwards (``data.split``)."""
FOLDERS_OF: Mapping[Split, Sequence[str]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
    "all": (),
}
"""What folders and lists of a split are called, the usual name first."""
MAX_LIST_BYTES = 1 << 30
"""Largest list of pictures or names that is read."""
LISTED = 20
"""As many problems are named one by one; the rest are counted."""


def listed(problems: Sequence[str]) -> str:
    """The problems one per line, the first :data:`LISTED` of them, then how many more."""
    lines = [f"  {problem}" for problem in problems[:LISTED]]
    if len(problems) > LISTED:
        lines.append(f"  ... and {len(problems) - LISTED} more")
    return "\n".join(lines)


def need_root(root: Path | None, kind: str) -> Path:
    """``root`` when it is a folder.

    Raises:
        DataError: it is not given, or no such folder exists.

    """
    if root is None:
        raise DataError(
            f"data.root: not given; data.format {kind!r} needs the folder of the data set (-o data.root=FOLDER)"
        )
    if not os.path.isdir(root):  # unlike Path.is_dir, this is no error for a name that is too long
        raise DataError(f"data.root: {root} is no folder here (in {Path.cwd()}); give the folder of the data set")
    return root


def first_existing(candidates: Sequence[Path], *, what: str, key: str, remedy: str = "") -> Path:
    """The first of ``candidates`` that exists.

    Raises:
        DataError: none does; all are named, and the spec key that can say otherwise, with what else may help.

    """
    for path in candidates:
        if os.path.exists(path):
            return path
    tried = list(dict.fromkeys(candidates))
    if len(tried) > 2:
        tried = [Path(os.path.abspath(path)) for path in tried]
        folder = Path(os.path.commonpath(tried))
        places = f"{', '.join(str(path.relative_to(folder)) for path in tried)} in {folder}"
    else:
        places = ", ".join(map(str, tried))
    raise DataError(f"{key}: no {what} found; looked for {places}; set {key}{remedy}")


def pictures_in(folder: Path) -> list[Path]:
    """All picture files below ``folder``, sorted; suffixes in any case."""
    return [path for path in walk(folder) if path.suffix.lower() in SUFFIXES]


def walk(folder: Path) -> list[Path]:
    """All files below ``folder``, sorted, so that the order of a listing does not matter. Hidden ones are left out."""
    found: list[Path] = []
    waiting: list[tuple[Path, frozenset[str]]] = [(folder, frozenset())]
    while waiting:
        place, around = waiting.pop()
        real = os.path.realpath(place)
        if real in around:  # a link to a folder around it
            continue
        _, folders, names = next(os.walk(place), ("", [], []))
        inner = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        waiting += [(place / name, around | {real}) for name in inner]
        found += [place / name for name in names if not name.startswith(".")]
    return sorted(found)


def lines_of(file: Path) -> list[str]:
    """The lines of a list file without blanks around them; empty ones are left out.

    Raises:
        DataError: it cannot be read, is no text, or is larger than any list.
    """
    try:
        text = read_text(file, limit=MAX_LIST_BYTES)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected a text file") from error
    except ValueError as error:
        raise DataError(f"{file}: {error}; expected a text file, saved as UTF-8") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def named(names: Sequence[str], what: str) -> str:
    """How many there are of ``what``, with the first five names."""
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a picture as displayed; (0, 0) where there is no such file: missing ones are told together.

    Raises:
        DataError: the file is no picture, or is cut short.

    """
    return probe(picture) if os.path.exists(picture) else (0, 0)


def unique_stems(files: Sequence[Path]) -> list[str]:
    """The names of ``files`` without folder and suffix; one that came before gets its place in the list behind it."""
    seen: set[str] = set()
    names = []
    for index, file in enumerate(files):
        names.append(file.stem if file.stem not in seen else f"{file.stem}-{index}")
        seen.add(file.stem)
    return names


def need_unique(ids: Iterable[object], *, where: str, what: str) -> None:
    """Refuse an id that occurs twice.

    Raises:
        DataError: some do; they are listed.

    """
    seen: set[object] = set()
    twice: list[str] = []
    for value in ids:
        if value in seen:
            twice.append(f"{value}")
        seen.add(value)
    if twice:
        raise DataError(f"{where}: {what} must be unique; these occur more than once:\n{listed(twice)}")


def order_names(found: Sequence[str], wanted: Sequence[str] | None, *, where: str) -> tuple[str, ...]:
    """Class names in label order: ``wanted`` (``data.names``) when given, else as found.

    Raises:
        DataError: ``wanted`` and ``found`` are not the same names.

    """
    if wanted is None:
        return tuple(found)
    unknown = [name for name in wanted if name not in found]
    missing = [name for name in found if name not in wanted]
    if not unknown and not missing and len(set(wanted)) == len(wanted):
        return tuple(wanted)
    parts = [f"data.names: {len(wanted)} classes given, {where} has {len(found)}: {', '.join(found)}"]
    for name in unknown:
        close = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
        parts.append(f"  {name!r} is not among them" + (f"; did you mean {close[0]!r}?" if close else ""))
    if missing:
        parts.append(f"  not given: {', '.join(missing)}")
    parts.append("  name each class once, or leave data.names out to take the data set's own order")
    raise DataError("\n".join(parts))
