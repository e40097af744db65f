"""Load the Horovod library, configure and start it."""

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from mtrain.errors import LaunchError, PluginError

STARTERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Environment variables of Horovod's launchers; each launcher sets one of them for its ranks."""


def load(framework: str = "torch") -> ModuleType:
    """Import Horovod's module for a framework, such as ``horovod.torch``, with its native library.

    Raises:
        PluginError: Horovod is missing, was built without the framework or for another version of it, with neither gloo nor
            MPI, or without gloo, over which the ranks were started.
    """
    advice = remedy(framework)
    try:
        hvd = importlib.import_module(f"horovod.{framework}")
    except (ImportError, OSError) as error:
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        raise PluginError(f"backend horovod: Horovod {what}", remedy=advice) from error
    # Without its native extension, importing horovod.torch only prints a warning; horovod.tensorflow says so in these words.
    if not hasattr(hvd, "init"):
        raise PluginError(f"backend horovod: Horovod was built without {framework}", remedy=advice)
    if not (hvd.gloo_built() or hvd.mpi_built()):
        raise PluginError("backend horovod: Horovod was built with neither gloo nor MPI", remedy=advice)
    if os.environ.get("HOROVOD_CONTROLLER") == "gloo" and not hvd.gloo_built():
        raise PluginError(
            "backend horovod: horovodrun has started the ranks over gloo, but Horovod was built without it",
            remedy=advice,
        )
    return hvd


def remedy(framework: str = "torch") -> str:
    """Return the advice that names the command which builds Horovod for a framework of this interpreter."""
    command = f"{shlex.quote(sys.executable)} -m mtrain doctor --build-horovod"
    if framework == "torch":
        return (
            f"`{command}` builds it for the installed torch "
            "(released wheels and `pip install horovod` do not fit torch 2.1 and newer)"
        )
    return f"`{command} --with {framework}` builds it for the installed {framework}"


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
