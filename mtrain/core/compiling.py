"""Compile a C file of mtrain for the processor at hand, once for each user, compiler and kind of processor."""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FLAGS = (
    "-O3",
    "-std=c11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
"""None of them lets the compiler change the order of additions or forget about NaN."""
APART = "-ffp-contract=off"
"""Flag that keeps a product and a sum two roundings, as they are in numpy."""
FOR_THIS_PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
"""Flags to try in this order; not every compiler knows each."""
COMPILERS = ("cc", "gcc", "clang")
TIME_LIMIT_S = 60


class CannotCompileError(Exception):
    """The kernels cannot be compiled here; the message says why, as part of a sentence."""


def compile_library(source: Path, *flags: str) -> Path:
    """Return the shared library made of ``source`` and the headers beside it, from the cache where it is there.

    Args:
        source: A C file.
        flags: Flags of the compiler in addition to ``FLAGS``, over which they count.

    Raises:
        CannotCompileError: There is no C compiler, or it refused the file.
    """
    compiler = _compiler()
    folder = _cache()
    target = folder / f"{source.stem}-{_digest(source, compiler, flags)}.so"
    if not _is_own(target):
        # Ranks that start together each compile a file of their own; the last one to be renamed stays.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as working:
            made = Path(working) / target.name
            _compile(compiler, source, made, flags)
            made.chmod(0o700)  # whatever the umask is
            made.replace(target)
    return target


def load_function(source: Path, name: str, *types: Any) -> Any | None:
    """Load a function of a C file, compiled with ``APART``, into this process; None if that cannot be. ``types``: of its arguments."""
    try:
        function = getattr(ctypes.CDLL(str(compile_library(source, APART))), name)
    except (CannotCompileError, OSError, AttributeError):
        return None
    function.argtypes = types
    return function


def _compiler() -> list[str]:
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CannotCompileError(f"CC is no command: {error}") from error
    for command in [named] if named else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise CannotCompileError("there is no C compiler (" + (named[0] if named else ", ".join(COMPILERS)) + ")")


def _cache() -> Path:
    """Return a folder that only this user can write to; a library in it will be loaded.

    Raises:
        CannotCompileError: There is none.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a container whose user has neither HOME nor a name
        raise CannotCompileError(f"this user has no home for compiled kernels; set XDG_CACHE_HOME ({error})") from error
    folder = Path(home) / "mtrain" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise CannotCompileError(f"{folder}: {error.strerror}") from error
    if _may_others_write(status):
        raise CannotCompileError(f"{folder} belongs to another user or can be written by others")
    if not os.access(folder, os.W_OK):
        raise CannotCompileError(f"{folder} cannot be written")
    return folder


def _is_own(library: Path) -> bool:
    """Return whether a library is there, which only this user can have written."""
    try:
        status = library.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and not _may_others_write(status)


def _may_others_write(status: os.stat_result) -> bool:
    return status.st_uid != os.geteuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _digest(source: Path, compiler: list[str], flags: tuple[str, ...]) -> str:
    """Name what the library depends on. A compiler is known by its file: asking for its version would start a process."""
    status = Path(compiler[0]).resolve().stat()
    shared = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    parts = (
        source.read_bytes(),
        shared,
        (*FLAGS, *flags),
        FOR_THIS_PROCESSOR,
        compiler,
        status.st_size,
        status.st_mtime_ns,
        _processor(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Describe the instructions of this processor, because homes are shared between hosts."""
    described = [sys.platform, platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for word in ("model name", "CPU part", "flags", "Features"):
            described += [line for line in lines if line.startswith(word)][:1]
    return "\n".join(described)


def _compile(compiler: list[str], source: Path, target: Path, flags: tuple[str, ...]) -> None:
    for special in FOR_THIS_PROCESSOR:
        command = [*compiler, *FLAGS, *special, *flags, "-I", str(source.parent), "-o", str(target), str(source), "-lm"]
        try:
            ended = subprocess.run(  # noqa: S603 - the user's own compiler
                command, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompileError(f"{compiler[0]}: {error}") from error
        if ended.returncode == 0 and target.is_file():
            return
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    raise CannotCompileError(f"{compiler[0]} refused the kernels: {last}")
