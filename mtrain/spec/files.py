"""Read files that others have written: only regular files, and only up to a given size.

Opening a named pipe waits for a writer for ever, and reading a device such as ``/dev/zero`` never ends. A path from a
user may be either, by mistake or on purpose.
"""

import contextlib
import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_OWN_BYTES = 64 << 20
"""Largest file of settings, facts or results in a run folder that is read, in bytes; mtrain writes kilobytes."""
_PART = 1 << 20
"""Bytes that are read at once where the size of a file is not known."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors of a disk that takes no more."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, through a link too. Nothing else is opened, so that no reading waits.

    Raises:
        OSError: it is missing, unreadable, or not a regular file; ``strerror`` says which.
    """
    return os.fdopen(_open_descriptor(path), "rb")


def _open_descriptor(path: Path) -> int:
    """Return a descriptor of a regular file; see ``open_file``."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    raise OSError(errno.EINVAL, f"is {kind}; expected a regular file", str(path))


def read_bytes(path: Path, *, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it is missing, unreadable, not a regular file, or longer than ``limit``; ``strerror`` says which.
    """
    descriptor = _open_descriptor(path)
    try:
        status = os.fstat(descriptor)
        # A read of n bytes allocates them at once, so the first call requests no more than the size of the file. Files in
        # /proc report size 0, a file may grow meanwhile, and a read may return less: the rest is read in parts.
        content = b"" if status.st_size > limit else os.read(descriptor, status.st_size + 1)
        if status.st_size <= limit and len(content) != status.st_size:
            content = _with_the_rest(content, descriptor, limit=limit)
        if status.st_size > limit or len(content) > limit:
            size = max(status.st_size, len(content))
            raise OSError(errno.EFBIG, f"{size} bytes, more than the {limit} that are read", str(path))
        return content
    finally:
        os.close(descriptor)


def _with_the_rest(content: bytes, descriptor: int, *, limit: int) -> bytes:
    """Return ``content`` and what follows it, up to a little more than ``limit`` bytes in all."""
    parts, size = [content], len(content)
    while size <= limit and (more := os.read(descriptor, min(_PART, limit + 1))):
        parts.append(more)
        size += len(more)
    return b"".join(parts)


def read_text(path: Path, *, limit: int) -> str:
    """Return the text of a regular UTF-8 file of at most ``limit`` bytes, without its byte order mark.

    Raises:
        OSError: like ``read_bytes``.
        ValueError: it is not UTF-8; the message says at which byte.
    """
    content = read_bytes(path, limit=limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from error


def parse_json(content: bytes | str) -> Any:
    """Return the value that JSON text holds.

    Raises:
        ValueError: it is not valid JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(content)
    # json's reader calls itself for each level, so brackets alone can end it.
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Return the lines that are JSON objects with a ``time``; others, and those that are cut off, are left out."""
    lines = []
    for text in content.splitlines():
        with contextlib.suppress(ValueError):
            line = parse_json(text)
            if isinstance(line, dict) and type(line.get("time")) in (int, float):
                lines.append(line)
    return lines


def path_problem(error: Exception) -> str:
    """Return the message for an error of a path, the current folder or a disk that takes no more; else ""."""
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_current_folder():
        return "the current folder does not exist any more; change to another one (cd)"
    if isinstance(error, PermissionError) and isinstance(error.filename, str | bytes):
        return (
            f"{os.fsdecode(error.filename)}: {error.strerror}; change its mode and those of the folders above it, give another "
            f"path, or be another user than {_user()}"
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        what = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "a file, or the output"
        return f"{what}: cannot be written: {error.strerror}; make room on that disk, or write to another one"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        return f"{name[:100]}...: {len(name)} characters are too long for a path; give the path of a file or folder"
    if isinstance(error, ValueError) and ("null byte" in str(error) or "null character" in str(error)):
        return "a path holds a null character; give the path of a file or folder"
    return ""


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _user() -> str:
    import getpass  # no command without this error needs it

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return str(os.getuid())
