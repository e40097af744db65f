"""Helpers that the annotation readers share: locating files, and errors that list all problems at once."""

import difflib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mtrain.core.interfaces import Split
from mtrain.data.images.header import SUFFIXES, probe
from mtrain.errors import DataError
from mtrain.spec.files import read_text

FOLDERS_OF: Mapping[Split, Sequence[str]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
    "all": (),
}
"""Names of the folders and lists of each split, the usual name first."""
MAX_LIST_BYTES = 1 << 30
"""Largest list of images or names that is read, in bytes."""
MAX_FOLDERS, MAX_FILES = 200_000, 20_000_000
"""Most folders and files of a data set. ImageNet has 22,000 folders and 14 million images."""
_NOT_DATA = ("__MACOSX", "lost+found")
"""Folders that archives and file systems add."""
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


def images_in(folder: Path) -> list[Path]:
    """Return all image files below ``folder``, sorted; suffixes match in any case."""
    return [path for path in walk(folder) if path.suffix.lower() in SUFFIXES]


def walk(folder: Path) -> list[Path]:
    """Return all files below ``folder`` except hidden ones, sorted so that the order of a directory listing does not
    matter; none if there is no such folder.

    Links are followed. A folder that several of them lead to is entered once, by its own path if that is below ``folder``.

    Raises:
        DataError: A folder cannot be read, or there are more than ``MAX_FOLDERS`` or ``MAX_FILES``.
    """
    if not os.path.isdir(folder):
        return []
    start = Path(os.path.realpath(folder))
    # A link to a folder that holds this one would make everything beside it a part of it.
    visited = {str(parent) for parent in start.parents}
    files: list[Path] = []
    # Links wait until everything below is visited, so that a folder is known by its own path, not by that of a link.
    links = [folder]
    while links:
        below = [links.pop(0)]
        found: list[Path] = []
        while below:
            directory = below.pop()
            real_path = os.path.realpath(directory)
            if real_path in visited:
                continue
            visited.add(real_path)
            _look(directory, files, below, found)
            _need_bounded(folder, len(visited) - len(start.parents), len(files))
        links += sorted(found)
    return sorted(files)


def leads_around(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to ``folder`` or to a folder that holds it."""
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def _look(directory: Path, files: list[Path], folders: list[Path], links: list[Path]) -> None:
    """Add what is in a folder to the three lists; hidden files, and folders that systems add, are left out."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not os.path.isdir(entry):  # unlike ``entry.is_dir``, this is no error for a link to itself
                    files.append(directory / entry.name)
                elif not entry.name.startswith(_NOT_DATA):
                    (links if entry.is_symlink() else folders).append(directory / entry.name)
    except OSError as error:
        raise DataError(
            f"{directory}: cannot be read ({error.strerror}); correct its permissions, or move it"
        ) from None


def _need_bounded(folder: Path, folders: int, files: int) -> None:
    if folders > MAX_FOLDERS or files > MAX_FILES:
        raise DataError(
            f"{folder}: more than {MAX_FOLDERS} folders or {MAX_FILES} files are below it; does a link lead out of the data "
            "set? Remove it, or give the folder of the data set"
        )


def text_of(file: Path, *, expected: str, limit: int = MAX_LIST_BYTES) -> str:
    """Return the text of a file.

    Args:
        file: A UTF-8 text file; a byte order mark is skipped.
        expected: What the file must be, for messages.
        limit: Largest file, in bytes.

    Raises:
        DataError: it cannot be read, is not text, or is larger than ``limit``.
    """
    try:
        return read_text(file, limit=limit)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected {expected}") from error
    except ValueError as error:
        raise DataError(f"{file}: {error}; expected {expected}, saved as UTF-8") from error


def lines_of(file: Path) -> list[str]:
    """Return the lines of a list file (see ``text_of``) without surrounding blanks; empty lines are left out."""
    return [line.strip() for line in text_of(file, expected="a text file").splitlines() if line.strip()]


def name_some(names: Sequence[str], what: str) -> str:
    """Format a count of ``what`` with the first five names."""
    return f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def size_of(image: Path) -> tuple[int, int]:
    """Return width and height of an image as displayed, or (0, 0) for a missing file: missing files are reported
    together.

    Raises:
        DataError: the file is no image, or is cut short.

    """
    return probe(image) if os.path.exists(image) else (0, 0)


def unique_stems(files: Sequence[Path]) -> list[str]:
    """Return the names of ``files`` without folder and suffix; a repeated name gets its position in the list
    appended."""
    stems: set[str] = set()
    names = []
    for index, file in enumerate(files):
        names.append(file.stem if file.stem not in stems else f"{file.stem}-{index}")
        stems.add(file.stem)
    return names


def divide(keys: Sequence[str], share: float, *, seed: int) -> tuple[list[int], list[int]]:
    """Return the positions of the samples for training and of those for evaluation, both in order: ``share`` of them, at
    least one in each part, a single sample for training.

    ``keys``: a name of each sample, the same on every host.
    """
    # A hash of the key decides, and not the position: most samples keep their part when others
    # are added, and the order in which a host lists its files does not matter. A file name
    # whose bytes are not UTF-8 has lone surrogates, which the default of ``encode`` refuses.
    digests = [hashlib.sha256(f"{seed}\0{key}".encode(errors="surrogatepass")).digest() for key in keys]
    order = sorted(range(len(keys)), key=digests.__getitem__)
    count = min(max(round(share * len(keys)), 1), len(keys) - 1)
    return sorted(order[count:]), sorted(order[:count])


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


def some_classes(names: Sequence[str]) -> str:
    """Return advice on how to learn these classes alone, of those of a data set."""
    shown = names if len(names) <= LISTED else [*names[:LISTED], "..."]
    return f"to learn these alone: -o 'data.classes=[{', '.join(shown)}]', in place of data.names"


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
    if not unknown and len(set(requested)) == len(requested):
        parts.append(f"  {some_classes(requested)}")
    parts.append("  name each class once, or leave data.names out to take the data set's own order")
    raise DataError("\n".join(parts))
