"""Helpers that the annotation readers share: locating files, and errors that list all problems at once."""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from mtrain.data.images.header import SUFFIXES, probe
from mtrain.errors import DataError
from mtrain.files import read_text

Split: TypeAlias = Literal["train", "val", "test", "all"]
"""Name of a split; ``all`` means every picture of the data set, which ``data.split`` divides afterwards."""
FOLDERS_OF: Mapping[Split, Sequence[str]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
    "all": (),
}
"""Names of the folders and lists of each split, the usual name first."""
MAX_LIST_BYTES = 1 << 30
"""Largest list of pictures or names that is read, in bytes."""
LISTED = 20
"""Number of problems that an error message lists; the rest are only counted."""


def listed(problems: Sequence[str]) -> str:
    """Format problems one per line: the first :data:`LISTED` of them, then how many more there are."""
    lines = [f"  {problem}" for problem in problems[:LISTED]]
    if len(problems) > LISTED:
        lines.append(f"  ... and {len(problems) - LISTED} more")
    return "\n".join(lines)


def need_root(root: Path | None, kind: str) -> Path:
    """Return ``root`` if it is a folder.

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
    """Return the first of ``candidates`` that exists.

    Raises:
        DataError: none does; the message names all of them, the spec key that sets the path, and ``remedy``.

    """
    for path in candidates:
        if os.path.exists(path):
            return path
    paths = list(dict.fromkeys(candidates))
    if len(paths) > 2:
        paths = [Path(os.path.abspath(path)) for path in paths]
        folder = Path(os.path.commonpath(paths))
        places = f"{', '.join(str(path.relative_to(folder)) for path in paths)} in {folder}"
    else:
        places = ", ".join(map(str, paths))
    raise DataError(f"{key}: no {what} found; looked for {places}; set {key}{remedy}")


def pictures_in(folder: Path) -> list[Path]:
    """Return all picture files below ``folder``, sorted; suffixes match in any case."""
    return [path for path in walk(folder) if path.suffix.lower() in SUFFIXES]


def walk(folder: Path) -> list[Path]:
    """Return all files below ``folder`` except hidden ones, sorted so that the order of a directory listing does not
    matter."""
    files: list[Path] = []
    pending: list[tuple[Path, frozenset[str]]] = [(folder, frozenset())]
    while pending:
        directory, ancestors = pending.pop()
        real_path = os.path.realpath(directory)
        if real_path in ancestors:  # a link to one of its own ancestors would never end
            continue
        _, folders, names = next(os.walk(directory), ("", [], []))
        subfolders = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        pending += [(directory / name, ancestors | {real_path}) for name in subfolders]
        files += [directory / name for name in names if not name.startswith(".")]
    return sorted(files)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a list file without surrounding blanks; empty lines are left out.

    Raises:
        DataError: it cannot be read, is not text, or is larger than ``MAX_LIST_BYTES``.
    """
    try:
        text = read_text(file, limit=MAX_LIST_BYTES)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected a text file") from error
    except ValueError as error:
        raise DataError(f"{file}: {error}; expected a text file, saved as UTF-8") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def named(names: Sequence[str], what: str) -> str:
    """Format a count of ``what`` with the first five names."""
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height of a picture as displayed, or (0, 0) for a missing file: missing files are reported
    together.

    Raises:
        DataError: the file is no picture, or is cut short.

    """
    return probe(picture) if os.path.exists(picture) else (0, 0)


def unique_stems(files: Sequence[Path]) -> list[str]:
    """Return the names of ``files`` without folder and suffix; a repeated name gets its position in the list
    appended."""
    stems: set[str] = set()
    names = []
    for index, file in enumerate(files):
        names.append(file.stem if file.stem not in stems else f"{file.stem}-{index}")
        stems.add(file.stem)
    return names


def need_unique(ids: Iterable[object], *, where: str, what: str) -> None:
    """Refuse an id that occurs twice.

    Raises:
        DataError: some do; they are listed.

    """
    unique_ids: set[object] = set()
    duplicates: list[str] = []
    for value in ids:
        if value in unique_ids:
            duplicates.append(f"{value}")
        unique_ids.add(value)
    if duplicates:
        raise DataError(f"{where}: {what} must be unique; these occur more than once:\n{listed(duplicates)}")


def order_names(available: Sequence[str], requested: Sequence[str] | None, *, where: str) -> tuple[str, ...]:
    """Return class names in label order: ``requested`` (``data.names``) if given, else the order of the data set.

    Raises:
        DataError: ``requested`` and ``available`` are not the same names.

    """
    if requested is None:
        return tuple(available)
    unknown = [name for name in requested if name not in available]
    missing = [name for name in available if name not in requested]
    if not unknown and not missing and len(set(requested)) == len(requested):
        return tuple(requested)
    parts = [f"data.names: {len(requested)} classes given, {where} has {len(available)}: {', '.join(available)}"]
    for name in unknown:
        close = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
        parts.append(f"  {name!r} is not among them" + (f"; did you mean {close[0]!r}?" if close else ""))
    if missing:
        parts.append(f"  not given: {', '.join(missing)}")
    parts.append("  name each class once, or leave data.names out to take the data set's own order")
    raise DataError("\n".join(parts))
