"""A folder at any address that fsspec knows, with the few operations that copies need."""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mtrain.errors import MtrainError, UsageError
from mtrain.spec import outputs, remedies
from mtrain.spec.addresses import checked_address, mask
from mtrain.spec.terminal import one_line
from mtrain_trace.masking import SECRET

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""Scheme of an address -> the package that fsspec needs for it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that has no room."""
LOCAL = ("file", "local")
READ_BYTES = 8 << 20
PART_BYTES = 1 << 20
"""Bytes that are written at once on a disk of this host."""
SHOWN_CHARACTERS = 300
"""Most characters of a library's message that are repeated."""
P = ParamSpec("P")
R = TypeVar("R")


class PlaceError(MtrainError):
    """A place cannot be reached, read or written; the message is one line without secrets."""

    def __init__(self, message: str, *, missing: bool = False, lasting: bool = False, full: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        """The object does not exist."""
        self.lasting = lasting
        """Trying again will not help: access is denied, or there is no room."""
        self.full = full
        """There is no room."""


def _as_place_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turn every exception of a storage library into ``PlaceError``: each library has exceptions of its own."""

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except MtrainError:
            raise
        except Exception as error:
            missing = isinstance(error, FileNotFoundError)
            full = getattr(error, "errno", None) in FULL
            lasting = missing or full or isinstance(error, PermissionError)
            raise PlaceError(reason_of(error), missing=missing, lasting=lasting, full=full) from error

    return call


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in one line, without the values of secret variables and passwords in addresses."""
    words = (getattr(error, "strerror", None) or str(error)) if isinstance(error, OSError) else str(error)
    first = next((line.strip() for line in str(words).splitlines() if line.strip()), "")
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            first = first.replace(value, "***")
    if isinstance(error, PermissionError):  # S3 gives no reason where only the size of an object was asked for.
        first += " (access is denied: check the credentials, and what they may do there)"
    first = re.sub(r"://[^/\s]*@", "://***@", first)
    first = one_line(first)
    return f"{type(error).__name__}: {first[:SHOWN_CHARACTERS]}" if first else type(error).__name__


class StorageFolder:
    """A folder at an address. Names are relative to it; no method changes anything outside of it."""

    def __init__(self, address: str, *, moved: Callable[[], None] = lambda: None) -> None:
        """Check the address; nothing is opened yet. ``moved`` is called whenever a part was read, written or deleted.

        Raises:
            UsageError: it is no address, or holds a password.
        """
        try:
            self.address = checked_address(address)
        except UsageError as error:
            raise UsageError(f"given {error}") from None
        self._moved = moved

    @property
    def in_words(self) -> str:
        """Return the address for messages."""
        return mask(self.address)

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return self.address.rpartition("/")[2]

    @property
    def _is_local(self) -> bool:
        return self._scheme in LOCAL

    @property
    def _scheme(self) -> str:
        return self.address.partition("://")[0].lower()

    def inside(self, name: str) -> "StorageFolder":
        """Return the folder ``name`` in this one."""
        return StorageFolder(f"{self.address}/{name}", moved=self._moved)

    @property
    def parent(self) -> "StorageFolder":
        """Return the folder that contains this one.

        Raises:
            UsageError: this is a whole bucket.
        """
        return StorageFolder(self.address.rpartition("/")[0], moved=self._moved)

    @cached_property
    def _system_and_path(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the folder's path in it.

        Raises:
            UsageError: the package for this kind of address is not installed.
        """
        scheme = self._scheme
        try:
            import fsspec
        except ImportError:
            raise UsageError(
                f"{self.in_words}: needs the package fsspec; install it with: {remedies.install('backup')}"
            ) from None
        # fsspec remembers listings and connections: another process may
        # have written meanwhile, and a broken connection would stay.
        settings: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if scheme in LOCAL:
            settings["auto_mkdir"] = True
        if scheme in ("s3", "s3a"):
            settings["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}
        try:
            files, path = fsspec.core.url_to_fs(self.address, **settings)
        except ImportError:
            package = PACKAGES.get(scheme, f"that fsspec's {scheme} asks for")
            raise UsageError(
                f"{self.in_words}: needs the package {package}; install it with `pip install {package}` into the Python that "
                "runs mtrain"
            ) from None
        except ValueError as error:
            raise UsageError(f"{self.in_words}: no address that fsspec knows ({reason_of(error)})") from None
        return files, str(path).rstrip("/")

    def check_package(self) -> None:
        """Check that the library for this address is installed. Nothing is connected.

        Raises:
            UsageError: it is not; the message names the package.
        """
        try:
            import fsspec

            fsspec.get_filesystem_class(self._scheme)
        except (ImportError, ValueError):
            # Loading the class connects to nothing, and tells in most
            # cases; only for a missing package the address is opened.
            assert self._system_and_path  # raises the error that names the package

    def _path(self, name: str) -> str:
        return f"{self._system_and_path[1]}/{name}" if name else self._system_and_path[1]

    # ------------------------------------------------------------------------------------------------------- reading
    @_as_place_errors
    def sizes(self) -> dict[str, int]:
        """Return all objects below this folder: relative name -> size in bytes; empty if there is no such folder."""
        files, root = self._system_and_path
        try:
            found = files.find(root, detail=True)
        except FileNotFoundError:
            return {}
        prefix = f"{root}/"
        return {
            path.removeprefix(prefix): int(facts.get("size") or 0)
            for path, facts in found.items()
            if path.startswith(prefix)
        }

    @_as_place_errors
    def folders(self) -> list[str]:
        """Return the names of the folders directly in this one; empty if it does not exist."""
        files, root = self._system_and_path
        try:
            entries = files.ls(root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(
            str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in entries if entry.get("type") == "directory"
        )

    def read(self, name: str, *, limit: int) -> bytes:
        """Return the content of an object.

        Raises:
            PlaceError: it is missing, unreadable, or longer than ``limit`` bytes.
        """
        content = b"".join(self.chunks(name, limit=limit))
        if len(content) > limit:
            raise PlaceError(f"{name}: more than the {limit} bytes that are read")
        return content

    def chunks(self, name: str, *, limit: int) -> Iterator[bytes]:
        """Yield the content of an object in parts, at most one part beyond ``limit`` bytes in all.

        Raises:
            PlaceError: it is missing or unreadable.
        """
        file, total = self._open(name), 0
        try:
            while total <= limit and (part := self._part(file, min(READ_BYTES, limit + 1 - total))):
                total += len(part)
                self._moved()
                yield part
        finally:
            file.close()

    @_as_place_errors
    def _open(self, name: str) -> Any:
        if self._is_local and not Path(self._path(name)).is_file():  # a pipe would wait, and a device would not end
            raise FileNotFoundError(2, "no such file", self._path(name))
        return self._ask_storage(name, lambda files, path: files.open(path, "rb", block_size=READ_BYTES))

    def _ask_storage(self, name: str, ask: Callable[[Any, str], R]) -> R:
        """Return what ``ask`` returns for fsspec's file system and the path of an object, which it asks by HEAD."""
        files, path = self._system_and_path[0], self._path(name)
        try:
            return ask(files, path)
        except Exception as error:
            # Some servers send a body after a refused HEAD, which the library takes for the next answer: only a GET tells why.
            if type(error).__name__ == "HTTPClientError":
                files.cat_file(path, start=0, end=1)
            raise

    @staticmethod
    @_as_place_errors
    def _part(file: Any, size: int) -> bytes:
        return bytes(file.read(size))

    @_as_place_errors
    def size(self, name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            PlaceError: it is missing, or the place cannot be reached.
        """
        return int(self._ask_storage(name, lambda files, path: files.info(path))["size"])

    def digest(self, name: str, *, size: int) -> str:
        """Return the SHA-256 of an object of at most ``size`` bytes; "" if it is longer."""
        digest, total = hashlib.sha256(), 0
        for part in self.chunks(name, limit=size):
            digest.update(part)
            total += len(part)
        return digest.hexdigest() if total <= size else ""

    # ------------------------------------------------------------------------------------------------------- writing
    @_as_place_errors
    def put(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._system_and_path[0].pipe_file(self._path(name), content)
        self._flush(name)
        self._moved()

    @_as_place_errors
    def upload(self, name: str, file: Path) -> None:
        """Write an object with the content of a file."""
        files, path = self._system_and_path[0], self._path(name)
        # Never through a link, which somebody else may have put there: see ``outputs``.
        if self._is_local:  # in parts, between which it is known that the disk still writes
            files.makedirs(os.path.dirname(path), exist_ok=True)
            with file.open("rb") as source, outputs.open_to_write(Path(path), "wb") as target:
                while part := source.read(PART_BYTES):
                    target.write(part)
                    self._moved()
        else:
            from fsspec.callbacks import Callback

            files.put_file(str(file), path, callback=Callback(hooks={"moved": lambda *_, **__: self._moved()}))
        self._flush(name)
        self._moved()

    def _flush(self, name: str) -> None:
        """Flush a file on a disk of this host, so that it survives a power cut before the manifest is written."""
        if self._is_local:
            descriptor = os.open(self._path(name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @_as_place_errors
    def remove(self, name: str) -> None:
        """Delete one object; nothing happens if it does not exist."""
        try:
            self._system_and_path[0].rm_file(self._path(name))
        except FileNotFoundError:
            return
        self._moved()

    @_as_place_errors
    def remove_folder(self, name: str) -> None:
        """Delete a folder with everything in it; nothing happens if it does not exist."""
        try:
            self._system_and_path[0].rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return
        self._moved()
