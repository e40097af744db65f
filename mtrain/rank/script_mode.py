"""The mode ``script`` of a rank: it runs a user's own training script, which calls ``mtrain.session``."""

import contextlib
import hashlib
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

import mtrain
from mtrain.core.interfaces import Backend
from mtrain.errors import Interrupted, ScriptError, UsageError
from mtrain.rank.process import SaveRequest
from mtrain.rank.records import log_to_stderr
from mtrain.records.display import Display
from mtrain.spec import collector
from mtrain.spec.files import open_file
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.spec.trial import Trial
from mtrain.system.runfolder import RunFolder


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The settings with which a rank was started; ``mtrain.session`` uses them where the script says nothing."""

    resolved: Resolved
    """The spec and its plugins."""
    run_folder: RunFolder
    resume: Path | None
    outside_paths: frozenset[str]
    """Paths of the spec that its user has set. A script that sets one of them to another value is refused."""
    stop: Callable[[], bool]
    """Returns whether this rank was asked to end."""
    save_requested: SaveRequest
    """Returns whether this rank was asked to save and to go on."""
    take_back: Callable[[], None] = field(default=lambda: None)
    """Takes over the signals of this rank; a script that does not know mtrain has them to itself until then."""
    leave: Callable[[BaseException], None]
    """Records an error for the starter, see ``process.Leaving``."""
    at_end: list[Callable[[Literal["done", "interrupted", "failed"]], None]] = field(default_factory=list)
    """Called when the script has ended, with the reason."""
    display: Display | None = None
    """Shows the records of this rank; None: the process that started the ranks does."""
    trial: Trial | None = None
    """What ``mtrain compare`` changes about the script's training; None: it runs as it is."""

    @property
    def spec(self) -> Spec:
        """Return the spec of the job."""
        return self.resolved.spec


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a script's code runs in."""

    job: RankJob | None = None
    """The job of this rank; None if the script was started by plain Python."""
    session_is_open: bool = False


PLAIN_PYTHON = Running()
RUNNING: ContextVar[Running] = ContextVar("mtrain_running", default=PLAIN_PYTHON)
"""Read by ``mtrain.session``, through ``running``."""
WORKER = "mtrain.rank.worker"
"""Module that ``python -m`` runs in a rank."""


def running() -> Running:
    """Return what this code runs in.

    Raises:
        ScriptError: it runs in a rank, but in another thread than the script's file. A thread has a context of its own without
            the job, and the script would train alone there, on every rank.
    """
    current = RUNNING.get()
    if current is PLAIN_PYTHON and WORKER in sys.orig_argv:
        raise ScriptError(
            "mtrain.session: called in a thread of its own; call it in the thread that runs the script, or start the thread with "
            "contextvars.copy_context().run"
        )
    return current


IMPORTS_TORCH = re.compile(r"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE)
NAMES_MTRAIN = re.compile(r"\bmtrain\b")
SETS_VARIABLES = re.compile(r"\b(?:environ|putenv)\b")


def allows_torch_ahead(script: Path) -> bool:
    """Return whether torch may be imported before ``script`` runs: the script imports it, and sets no variables that torch reads."""
    try:
        with open_file(script) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(IMPORTS_TORCH.search(text)) and not SETS_VARIABLES.search(text)


def knows_mtrain(script: Path) -> bool:
    """Return whether ``script`` mentions mtrain, so that it may ask whether it is to end. An unreadable one is refused later."""
    try:
        with open_file(script) as file:
            return bool(NAMES_MTRAIN.search(file.read().decode("utf-8", errors="replace")))
    except OSError:
        return True


def import_ahead(backend: Backend) -> None:
    """Import the framework and what ``mtrain.session`` needs, without collections of garbage, which take a third of the time."""
    with collector.paused(), contextlib.suppress(Exception):  # the script imports it again, and says what is wrong
        import_module("mtrain.rank.script.session")
        _ = backend.nn, backend.ops
    collector.keep_all()


def digest_of(script: Path) -> str:
    """Return the SHA-256 of a script, by which hosts with different versions of it are found."""
    with open_file(script) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_own_frames(error: BaseException) -> BaseException:
    """Drop the frames of mtrain and of Python's own modules before the script's first one from ``error``; return it."""
    own = (str(Path(mtrain.__file__).parent), "<frozen ", contextlib.__file__)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def _ended(job: RankJob, reason: Literal["done", "interrupted", "failed"]) -> None:
    """Tell those who want to know that the script has ended."""
    for call in job.at_end:
        call(reason)


def run_script(job: RankJob, script: Path, arguments: Sequence[str], *, digest: str | None) -> None:
    """Run ``script`` as the main program of this rank.

    Raises:
        UsageError: the script is missing on this host, or differs from the one of the host that started the job.
    """
    log_to_stderr()
    host = os.uname().nodename
    try:
        own_digest = digest_of(script)
    except OSError as error:
        raise UsageError(
            f"{script}: cannot be read on {host}: {error.strerror}; every host needs the script"
        ) from error
    if digest is not None and own_digest != digest:
        raise UsageError(
            f"{script}: the script on {host} (sha256 {own_digest[:12]}) is not the one with which the job was started "
            f"(sha256 {digest[:12]}); copy it to every host"
        )
    if job.resolved.backend.framework == "torch" and allows_torch_ahead(script):
        import_ahead(job.resolved.backend)
    job.resolved.backend.before_script()
    before = RUNNING.set(Running(job=job))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
        _ended(job, "done")
    except SystemExit as error:
        # A script may end with sys.exit(0); anything else is a failure of this rank.
        has_failed = error.code not in (None, 0)
        if has_failed:
            job.leave(without_own_frames(error))
        _ended(job, "failed" if has_failed else "done")
        if has_failed:
            raise
    except BaseException as error:
        job.leave(without_own_frames(error))  # before the frames of mtrain are added again
        _ended(job, "interrupted" if isinstance(error, Interrupted) else "failed")
        raise
    finally:
        RUNNING.reset(before)
