"""Load the Horovod library, configure and start it."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from mtrain.errors import LaunchError, PluginError

STARTERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of Horovod's launchers; each launcher sets one of them for its ranks."""


def load() -> ModuleType:
    """Import ``horovod.torch`` with its native library.

    Raises:
        PluginError: Horovod is missing, was built without torch or for another torch, with neither gloo nor MPI, or without
            gloo, over which the ranks were started.
    """
    try:
        import horovod.torch as hvd
    except (ImportError, OSError) as error:
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        raise PluginError(f"backend horovod: Horovod {what}", remedy=remedy()) from error
    if not hasattr(hvd, "init"):  # without its native extension, importing horovod.torch only prints a warning
        raise PluginError("backend horovod: Horovod was built without torch", remedy=remedy())
    if not (hvd.gloo_built() or hvd.mpi_built()):
        raise PluginError("backend horovod: Horovod was built with neither gloo nor MPI", remedy=remedy())
    if os.environ.get("HOROVOD_CONTROLLER") == "gloo" and not hvd.gloo_built():
        raise PluginError(
            "backend horovod: horovodrun has started the ranks over gloo, but Horovod was built without it",
            remedy=remedy(),
        )
    module: ModuleType = hvd
    return module


def remedy() -> str:
    """Return the advice that names the command which builds Horovod for the torch of this interpreter."""
    return (
        f"`{shlex.quote(sys.executable)} -m mtrain doctor --build-horovod` builds it for the installed torch "
        "(released wheels and `pip install horovod` do not fit torch 2.1 and newer)"
    )


def start(hvd: ModuleType, settings: Mapping[str, str]) -> None:
    """Call ``hvd.init()`` with ``settings`` in the environment, the only place where Horovod looks for them.

    Raises:
        LaunchError: No launcher started this process as a rank, or the ranks do not find each other.
    """
    if not any(name in os.environ for name in STARTERS):
        raise LaunchError(
            "backend horovod was not started by horovodrun: none of " + ", ".join(STARTERS) + " is set; use "
            "`mtrain -c SPEC --backend horovod`, or `horovodrun --gloo -np N python -m mtrain.rank.worker ...`"
        )
    with _environment(settings):
        try:
            hvd.init()
        except (ValueError, RuntimeError) as error:
            raise LaunchError(
                f"backend horovod: the ranks did not find each other: {error}; see the lines above in this log, and "
                "raise backend.options.silence_s where ranks take long to start"
            ) from error


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Put ``settings`` into the environment of this process while inside."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
