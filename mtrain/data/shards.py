"""Find the files of a split by their names, for formats that store many samples in a file."""

from collections.abc import Sequence
from pathlib import Path

from mtrain.core.interfaces import Split
from mtrain.data.reading import FOLDERS_OF, need_root, walk
from mtrain.errors import DataError


def files_of(
    root: Path | None, value: str | None, *, split: Split, suffixes: Sequence[str], kind: str, also: Sequence[str] = ()
) -> list[Path]:
    """Return the files of a split, sorted by name.

    ``value`` (``data.train`` or ``data.val``) is a file, a folder or a pattern such as ``data/train-*.tar``, from
    ``root``. Without it, a file belongs to a split if its name, or the name of a folder above it, begins with the name
    of the split (``train``; ``val`` or ``valid...``), and every file belongs to the split ``all`` if none is for
    evaluation.

    Args:
        root: Folder of the data set.
        value: The split in the spec.
        split: The split.
        suffixes: Lower-case suffixes of the format's files.
        kind: Name of the format, for messages.
        also: Names of files without their suffix that mean the whole set (``all``).

    Raises:
        DataError: there are none.
    """
    root = need_root(root, kind)
    key = f"data.{'train' if split == 'all' else split}"
    if value is not None:
        return _files_of(root, value, suffixes, key=key)
    files = _with_suffix(walk(root), suffixes)
    if split != "all":
        chosen = [file for file in files if _belongs(file.relative_to(root), split)]
        if chosen:
            return chosen
        found = f"found {', '.join(str(file.relative_to(root)) for file in files[:5])}" if files else "there are none"
        divide = ", or data.split=0.2 to divide one set" if files else ""
        raise DataError(
            f"{key}: no file of the {split} split in {root} ({' '.join(suffixes)}, with a name that begins with "
            f"{' or '.join(FOLDERS_OF[split])}); {found}; set {key}{divide}"
        )
    if not files:
        raise DataError(f"{key}: no file ({' '.join(suffixes)}) in {root}; set data.root or {key}")
    own = [file for file in files if _belongs(file.relative_to(root), "val")]
    # Files of an evaluation split would otherwise be divided with the others, and trained on.
    if own:
        raise DataError(
            f"data.split: {root} has an evaluation split of its own ({own[0].relative_to(root)}); leave out data.split, or "
            "name the files to divide with data.train"
        )
    return [file for file in files if file.stem.lower() in also] or files


def _files_of(root: Path, value: str, suffixes: Sequence[str], *, key: str) -> list[Path]:
    path = root / value
    try:
        if path.is_dir():
            files = _with_suffix(walk(path), suffixes)
        elif path.exists():
            files = [path]
        else:
            is_pattern = any(letter in value for letter in "*?[") and not Path(value).is_absolute()
            files = sorted(file for file in root.glob(value) if file.is_file()) if is_pattern else []
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {value[:200]!r} cannot be a name of files ({error})") from error
    if not files:
        raise DataError(
            f"{key}: {path} is no file, no folder with {' or '.join(suffixes)} files, and no pattern that matches a file; "
            "give one of these, from data.root"
        )
    return files


def _with_suffix(files: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    return [file for file in files if file.suffix.lower() in suffixes]


def _belongs(name: Path, split: Split) -> bool:
    """Return whether a path within the data set names the split."""
    words = FOLDERS_OF[split]
    return any(_begins(part.lower(), word) for part in (*name.parts[:-1], name.stem) for word in words)


def _begins(text: str, word: str) -> bool:
    """Return whether ``text`` is ``word``, or continues with something else than a letter (``train-00000``)."""
    return text.startswith(word) and not text[len(word) : len(word) + 1].isalpha()
