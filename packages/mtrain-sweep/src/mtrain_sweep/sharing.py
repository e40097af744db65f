"""One warm process of which the trials of a sweep are copies, see ``system.warm``: its other end, which a sweep holds."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.errors import MtrainError
from mtrain.system import environment, processes
from mtrain.system.warm import PADDING, Ahead, Messages
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.places import TrialFiles

LOG = "warm.log"
"""What the warm process itself has printed: beside the logs of the trials."""
READY_S = 300.0
"""Seconds in which the warm process must have imported everything."""
ANSWER_S = 60.0
LOST = 1
"""Exit status of a trial whose warm process has died; the trial was asked to save then."""
OF_A_PROCESS = ("backend.", "cluster.", "launcher.", "plugins")
"""Beginnings of the paths of a spec that decide what a process imports, and with which variables."""
PARTS = (
    *(
        "mtrain.commands.train",
        "mtrain.commands.training_request",
        "mtrain.jobs.resume.load",
        "mtrain.jobs.hosts.allocated_hosts",
        "mtrain.records.wording",
        "mtrain.jobs.job",
        "mtrain.jobs.hosts.this_host",
        "mtrain.records.display",
    ),
    *("mtrain_ui.pages.report", "mtrain.rank.spec.train", "mtrain.rank.spec.assembly", "mtrain.data.loader.pool"),
    *("mtrain.jobs.preflight.job_checks", "mtrain.records.reporter", "mtrain.weights.models"),
)
"""Modules that a trial imports."""


class Copies:
    """The warm process of a sweep. It ends with the sweep."""

    def __init__(self, ahead: Ahead, *, env: Mapping[str, str], log: Path) -> None:
        """Start it, and wait until it is ready or has said that it cannot be.

        Raises:
            OSError: It cannot be started.
        """
        mine, its = socket.socketpair()
        with its:
            argv = [sys.executable, "-u", "-m", "mtrain.system.warm", str(its.fileno()), "." * PADDING]
            self._process = processes.start(argv, env=env, log=log, kept_files=(its.fileno(),))
        self._connection = mine
        self._messages = Messages(mine)
        self._ended: dict[int, int] = {}
        self.is_ready = False
        """Whether trials can be its copies."""
        self._say({name: getattr(ahead, name) for name in Ahead.__slots__})
        answer = self._answer("ready")
        self.is_ready = bool(answer)

    def start(self, words: Sequence[str], *, env: Mapping[str, str], log: Path) -> int | None:
        """Start a copy; return its process id, or None if it cannot be started so."""
        self._say({"start": {"words": list(words), "env": dict(env), "log": str(log)}})
        pid = self._answer("started")
        return pid if isinstance(pid, int) else None

    def status(self, pid: int) -> int | None:
        """Return the exit status of a copy, negative for a signal; None while it runs."""
        # Ends of several copies come over one connection, in the order in which they happen.
        while pid not in self._ended and self._messages.arrives(0.0):
            self._hear()
        self.is_ready = self.is_ready and not self._messages.is_closed
        return self._ended.get(pid, None if self.is_ready else LOST)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a copy that runs."""
        self._say({"signal": [pid, int(number)]})

    def close(self) -> None:
        """End the process. Copies that still run are asked to save."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=ANSWER_S)

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._messages.say(message)
        except OSError:
            self.is_ready = False

    def _hear(self) -> Mapping[str, Any]:
        message = self._messages.hear()
        if "ended" in message:
            pid, status = message["ended"]
            self._ended[pid] = status
        return message

    def _answer(self, name: str) -> object:
        """Return the answer of that name; None: something else was answered, or nothing."""
        while self._messages.arrives(READY_S):
            message = self._hear()
            if "ended" not in message:
                return message.get(name)
        self.is_ready = False
        return None


class CopiedJob:
    """The process of a trial that is a copy of the warm one, as ``LocalJob`` looks at it."""

    def __init__(self, copies: Copies, pid: int) -> None:
        self._copies, self._pid = copies, pid

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._copies.status(self._pid)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        self._copies.send(self._pid, signal.Signals(number))


def copies_for(
    definition: SweepDefinition, folder: Path, *, variables: Callable[[], Mapping[str, str]]
) -> Copies | None:
    """Return a warm process for the trials of a sweep; None where each has to be a process of its own.

    They have to where GPUs are visible, on several hosts, and where what is searched decides what a process imports. ``variables``
    returns those of the trials; libraries that a plan imports may change them.
    """
    from mtrain.jobs.plan import means
    from mtrain.jobs.plan.plan import make_plan

    searched = [
        path for one in definition.parameters for path in (one.name, *(key for keys in one.settings for key in keys))
    ]
    # What a process has imported, and with which variables, cannot be undone for one copy.
    if any(name.startswith(OF_A_PROCESS) for name in searched):
        return None
    loaded = definition.trial_spec({one.name: one.extremes()[0] for one in definition.parameters})
    if means.is_several(loaded.spec) or loaded.spec.backend.python is not None:
        return None
    try:
        copier = _copier(loaded.job.backend.framework)
        if copier is None:
            return None
        first = make_plan(loaded, run_dir=TrialFiles(folder, 0).run_dir).commands[0]
        kinds = [type(loaded.job.model), loaded.job.task_named(loaded.job.model_class.kind)]
        ahead = Ahead(
            copier=copier,
            rank="mtrain.rank.worker",
            rank_words=["--run-dir", "."],
            programs=["mtrain.__main__", *([] if first.argv[2] == "mtrain.rank.worker" else [first.argv[2]])],
            parts=[*PARTS, *(kind.__module__ for kind in kinds)],
        )
        env = environment.join_variables(environment.clean(variables()), first.env)
        copies = Copies(ahead, env=env, log=folder / "logs" / LOG)
    except (MtrainError, OSError):
        return None  # whatever is wrong, a trial says better
    if not copies.is_ready:
        copies.close()
        return None
    return copies


def _copier(framework: str) -> str | None:
    """Return the module that imports a rank's program for copies, if there is one for this framework."""
    name = f"mtrain.backends._{framework}.forked"
    return name if find_spec(framework) and find_spec(name) else None
