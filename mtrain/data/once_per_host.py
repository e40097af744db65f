"""Let the ranks of one host read something large once, and map its arrays instead of holding a copy each.

The first rank reads, and writes the arrays into a file of the temporary folder; the others wait for its lock and map the
file, as the first one does then. Once all ranks of the host have it, the file loses its name, and its pages go with the last
rank. Whatever is in the way (no room, a folder that cannot be written) makes a rank read by itself, as it would alone.
"""

import atexit
import fcntl
import json
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import SplitRequest

Content = TypeVar("Content")
Read = TypeVar("Read", bound=Callable[..., Any])
LEAST_IMAGES = 1000
"""Fewer images are read by each rank: they take no second, and no memory to speak of."""
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "PADDLE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
"""Variables in which launchers tell a rank how many ranks its host has."""
PREFIX = "mtrain-once-"
OLD_S = 86_400.0
"""Seconds after which a file is removed that a killed job has left."""
ALIGN = 64
_HEAD = struct.Struct("=QQ")
"""Ranks that have mapped the file, and bytes of the description that follows; 0: the content is too small to share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a content becomes arrays and back."""

    take_apart: Callable[[Any], tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]] | None]
    """Returns its arrays by name, and the rest as plain values; None: it is too small to be shared."""
    put_together: Callable[[Mapping[str, NDArray[Any]], Mapping[str, Any]], Any]


def ranks_here(environ: Mapping[str, str]) -> int:
    """Return how many ranks of this job are on this host, as far as the launcher says; 1 where it does not."""
    return next((int(environ[name]) for name in LOCAL_SIZES if environ.get(name, "").isdigit()), 1)


def read_once(
    read: Callable[[], Content], *, key: str, form: Form, environ: Mapping[str, str] | None = None
) -> Content:
    """Return what ``read`` returns, from the rank of this host that comes first. Every rank of the host must call.

    Args:
        read: reads the content; it may raise any exception.
        key: names the content among all that this job reads.
        form: how it is taken apart and put together.
        environ: the environment of this rank; None: that of this process.
    """
    ranks = ranks_here(os.environ if environ is None else environ)
    if ranks <= 1:
        return read()
    # Ranks of one job on one host have the same parent; those that have not share nothing, and each reads by itself.
    name = sha256(f"{os.getppid()} {_began(os.getppid())} {key}".encode()).hexdigest()[:24]
    path = os.path.join(tempfile.gettempdir(), f"{PREFIX}{os.geteuid()}-{name}")
    _sweep(os.path.dirname(path))
    try:
        descriptor = _lock(path)
    except OSError:
        return read()
    try:
        return _share(descriptor, path, read, form, ranks)
    finally:
        # The map has a descriptor of its own, which would keep the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def once_per_host(form: Form) -> Callable[[Read], Read]:
    """Let one rank of each host run the ``read`` of a data set, and the others map what it has returned."""

    def share(read: Any) -> Any:
        @wraps(read)
        def read_shared(self: Any, request: SplitRequest) -> Any:
            key = f"{type(self).__module__}.{type(self).__qualname__} {self.options!r} {request!r}"
            return read_once(lambda: read(self, request), key=key, form=form)

        return read_shared

    return share


def _began(process: int) -> str:
    """Return when a process began, in the kernel's ticks, so that a number that is used again is another process."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def _lock(path: str) -> int:
    """Open the file, which is this user's own, and lock it for this rank alone."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise OSError(f"{path} is not a file of this user")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # The last rank of a former content has removed it meanwhile.


def _share(descriptor: int, path: str, read: Callable[[], Content], form: Form, ranks: int) -> Content:
    if os.fstat(descriptor).st_size < _HEAD.size:
        content, parts = read(), None
        try:
            parts = form.take_apart(content)
            atexit.register(_remove, path, os.fstat(descriptor).st_ino)
            _write(descriptor, parts)
        except OSError:
            os.ftruncate(descriptor, 0)
            _remove(path, os.fstat(descriptor).st_ino)
            return content
        if parts is None:
            return content
        # This rank maps the file too, so that its own copy can go.
        del content, parts
    users, length = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))
    os.pwrite(descriptor, _HEAD.pack(users + 1, length), 0)
    if users + 1 >= ranks:
        _remove(path, os.fstat(descriptor).st_ino)
    return form.put_together(*_map(descriptor, length)) if length else read()


def _write(descriptor: int, parts: tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]] | None) -> None:
    if parts is None:
        os.pwrite(descriptor, _HEAD.pack(1, 0), 0)
        return
    arrays, facts = parts
    places, end = [], 0
    for name, array in arrays.items():
        places.append({"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "at": end})
        end += -(-array.nbytes // ALIGN) * ALIGN
    described = json.dumps({"arrays": places, "facts": facts}).encode()
    start = _start(len(described))
    os.ftruncate(descriptor, max(start + end, _HEAD.size))
    with open(os.dup(descriptor), "r+b") as file:
        file.seek(_HEAD.size)
        file.write(described)
        for place, array in zip(places, arrays.values(), strict=True):
            file.seek(start + place["at"])  # type: ignore[operator]
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    # Last: where a rank is killed before, the head is 0, and the others read by themselves.
    os.pwrite(descriptor, _HEAD.pack(0, len(described)), 0)


def _start(described_bytes: int) -> int:
    return -(-(_HEAD.size + described_bytes) // ALIGN) * ALIGN


def _map(descriptor: int, length: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    described = json.loads(os.pread(descriptor, length, _HEAD.size))
    content, start = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), _start(length)
    arrays = {}
    for place in described["arrays"]:
        shape = tuple(place["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        arrays[place["name"]] = np.frombuffer(content, place["dtype"], count, start + place["at"]).reshape(shape)
    return arrays, described["facts"]


def _remove(path: str, inode: int) -> None:
    """Remove the name of a file, unless another file has it meanwhile."""
    with suppress(OSError):
        if os.lstat(path).st_ino == inode:
            os.unlink(path)


def _sweep(folder: str) -> None:
    """Remove what killed jobs of this user have left."""
    own = f"{PREFIX}{os.geteuid()}-"
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(own):
                status = entry.stat(follow_symlinks=False)
                if time.time() - status.st_mtime > OLD_S:
                    _remove(entry.path, status.st_ino)
