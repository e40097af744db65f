"""Write files into folders that somebody else may have prepared: never through a link, never into a pipe or a device.

A run folder can come from another person. If its ``metrics.jsonl`` is a link to a file elsewhere, a job that continues
there must not write to that file. The run folder itself, and the folders above it, may be links: the user named them.
"""

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

LONE = "backslashreplace"
r"""How text is encoded. A file name whose bytes are not UTF-8 holds lone surrogates, which become escapes such as ``\udce9``;
in JSON these mean the same text again."""
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a named pipe waits for somebody who reads from it."""


def open_to_write(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a regular file like ``open``, but not through a link. ``mode``: any of those that write.

    Raises:
        OSError: like ``open``; also if ``path`` is a link, a pipe or a device, which ``strerror`` then says.
    """
    return open(path, mode, opener=_descriptor, **options)


def _descriptor(path: str, flags: int) -> int:
    try:
        # A file is truncated only when it is known to be a regular one.
        descriptor = os.open(path, flags & ~os.O_TRUNC | _FLAGS, 0o666)
    except OSError as error:
        if Path(path).is_symlink():
            raise _link_error(Path(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is not a regular file; remove it", path)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


@contextmanager
def replace(path: Path) -> Iterator[BinaryIO]:
    """Give a new file that takes the name ``path`` in one step when the block ends; after an error it is removed.

    A reader sees either the old content or the new. A link of this name is replaced by the file, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    with replaced_by(path) as temporary, open_to_write(temporary, "xb") as file:
        yield cast("BinaryIO", file)


@contextmanager
def replaced_by(path: Path) -> Iterator[Path]:
    """Give a free name beside ``path`` for a file that a library writes; see ``replace``."""
    # Processes of several hosts may write here, and their numbers and names may be equal: a random name is free.
    temporary = path.with_name(f".{path.stem[:40]}.{os.urandom(6).hex()}{path.suffix[:20]}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # That of a write, such as one to a full disk, names no file.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step by a file with this content; see ``replace``."""
    with replace(path) as file:
        file.write(content)


def add_json_line(path: Path, fields: Mapping[str, Any]) -> None:
    """Add a line of JSON with the time to a file, as far as that is possible: no job ends for it."""
    line = json.dumps({"time": round(time.time(), 3), **fields}, ensure_ascii=False) + "\n"
    with suppress(OSError), open_to_write(path, "a", encoding="utf-8", errors=LONE) as file:
        file.write(line)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step by a UTF-8 file with this text; see ``replace`` and ``LONE``."""
    write_bytes(path, text.encode("utf-8", LONE))


def make_folder(path: Path) -> None:
    """Make a folder that its owner alone can use, and those above it. An existing folder is left as it is.

    Raises:
        OSError: it cannot be made, or ``path`` is a link.
    """
    if path.is_symlink():
        raise _link_error(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def refuse_links_out(folder: Path) -> None:
    """Look for links that lead out of ``folder``, in it and in the folders directly in it.

    Libraries (TensorBoard's writer, for example) write into these folders too, and follow links.

    Raises:
        OSError: there is one; ``strerror`` names it and where it leads.
    """
    inside = folder.resolve()
    for entry in _entries(inside):
        if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(inside):
            raise _link_error(folder / Path(entry.path).relative_to(inside))


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield what is in ``folder`` and in its folders; nothing of a folder that does not exist or cannot be read."""
    for entry in _scan(folder):
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _scan(Path(entry.path))


def _scan(folder: Path) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _link_error(path: Path) -> OSError:
    try:
        target = os.readlink(path)
    except OSError:
        target = "another place"
    return OSError(
        errno.ELOOP,
        f"{path} is a link to {target}; nothing is written through links in a run folder: remove the link, or put the "
        "whole run folder where its files shall be",
        str(path),
    )
