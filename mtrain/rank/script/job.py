"""What the code of a user's script runs in: the settings of its rank, and whether its session is open."""

import contextlib
import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mtrain.errors import ScriptError
from mtrain.rank.process import SaveRequest
from mtrain.records.display import Display
from mtrain.spec.calls import PACKAGE
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
STARTED: list[RankJob] = []
"""The job whose script this process runs, for threads, which do not see the variable above; empty outside of ranks."""


def running() -> Running:
    """Return what this code runs in.

    Raises:
        ScriptError: it runs in a rank, but in another thread than the script's file. A thread has a context of its own without
            the job, and the script would train alone there, on every rank.
    """
    current = RUNNING.get()
    if current is PLAIN_PYTHON and STARTED:
        raise ScriptError(
            "mtrain.session: called in a thread of its own; call it in the thread that runs the script, or start the thread with "
            "contextvars.copy_context().run"
        )
    return current


def digest_of(script: Path) -> str:
    """Return the SHA-256 of a script, by which hosts with different versions of it are found."""
    with open_file(script) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_own_frames(error: BaseException) -> BaseException:
    """Drop the frames of mtrain and of Python's own modules before the script's first one from ``error``; return it."""
    # `runpy` is among Python's frozen modules, and `contextlib` stands between the script and `mtrain.session`.
    own = (PACKAGE, "<frozen ", contextlib.__file__)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)
