"""The job of one trial: a command on this machine, which may lead several hosts, or a job in the queue of a scheduler."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import psutil

from mtrain.core.interfaces.queue import Queue, QueuedJob
from mtrain.errors import UsageError
from mtrain.spec import package_parts
from mtrain.spec.reserved import RESERVED
from mtrain.spec.sources import FOREIGN, PREFIX
from mtrain.system import environment, processes
from mtrain.system.devices import HIDING
from mtrain.system.log_limit import end_of
from mtrain_sweep.places import TrialFiles
from mtrain_sweep.sharing import CopiedJob, Copies

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

ASK_S = 5.0
"""Seconds between two questions to a scheduler about one job."""
MOST_UNKNOWN = 5
"""A job that the scheduler does not know any more has ended after so many questions."""
MOST_ERRORS = 60
"""A scheduler may fail to answer so many times in a row before the sweep gives up."""
LEFTOVER_S = 90.0
"""Seconds in which processes that a killed trial has left may save and end by themselves."""
KILLED = re.compile(r"was ended by signal \d+")
"""What mtrain says of a rank that was killed from outside."""
MOST_LOG_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEnd:
    """How the job of a trial ended."""

    code: int
    reason: str = ""
    killed: bool = False
    """Something outside ended it: it can go on from its checkpoint."""


class LocalJob:
    """A command of this machine; it saves and ends when this process dies."""

    def __init__(self, place: TrialFiles, *, gpus: Sequence[str] | None = None, copies: Copies | None = None) -> None:
        """Start the command.

        Args:
            place: The files of the trial.
            gpus: Those that it may use, as ``CUDA_VISIBLE_DEVICES`` names them; None: all.
            copies: A process of which the command becomes a copy; None: it is started anew.
        """
        end_leftovers(place)
        self._log = place.log
        self._before = place.log.stat().st_size if place.log.exists() else 0
        # `if-any`: a trial that was killed goes on from its checkpoint, a new one begins.
        argv = [sys.executable, "-m", "mtrain", "train", "-c", str(place.spec), "--resume", "if-any"]
        variables = caller_without_values() | ({} if gpus is None else {HIDING: ",".join(gpus)})
        pid = None if copies is None else copies.start(argv, env=variables, log=place.log)
        self._process: subprocess.Popen[bytes] | CopiedJob
        if copies is None or pid is None:
            self._process = processes.start(argv, env=variables, log=place.log)
        else:
            self._process = CopiedJob(copies, pid)

    def poll(self) -> TrialEnd | None:
        """Return how the job has ended; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return TrialEnd(code=0)
        # The log of a trial that goes on has the errors of its earlier starts too.
        reason = _last_error(end_of(self._log, start=self._before, limit_bytes=MOST_LOG_BYTES))
        if code < 0:
            name = signal.Signals(-code).name
            return TrialEnd(code=1, reason=f"its command was ended by {name}", killed=True)
        return TrialEnd(code=code, reason=reason, killed=code in (130, 143) or bool(KILLED.search(reason)))

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the job to save and to end, or to end at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if at_once else signal.SIGTERM)


class QueuedTrial:
    """A job in the queue of a scheduler; one that an earlier sweep process has submitted is taken over."""

    def __init__(self, place: TrialFiles, loaded: "Loaded") -> None:
        submission = package_parts.load("submissions", "queues", f"cluster.name: {loaded.spec.cluster.name}")
        self._queue: Queue = submission.queue_of(loaded)
        self._asked, self._unknown, self._errors = 0.0, 0, 0
        # A sweep that was killed has left its jobs in the queue, where they may still run.
        known = [job for job in submission.jobs(place.runs) if job.name == place.name]
        running = [job for job in known if not self._queue.state(job).ended]
        self._job: QueuedJob = running[-1] if running else submission.submit(submission.prepare(loaded))

    def poll(self) -> TrialEnd | None:
        """Return how the job has ended; None: it runs."""
        if time.monotonic() - self._asked < ASK_S:
            return None
        self._asked = time.monotonic()
        try:
            state = self._queue.state(self._job)
        except UsageError:  # The scheduler may be away for a while; its jobs run on.
            self._errors += 1
            if self._errors > MOST_ERRORS:
                raise
            return None
        self._errors = 0
        self._unknown = self._unknown + 1 if state.phase == "unknown" else 0
        if state.phase == "done":
            return TrialEnd(code=0)
        if not state.ended and self._unknown < MOST_UNKNOWN:
            return None
        reason = (
            _last_error("\n".join(self._queue.logs(self._job, follow=False)))
            or f"{self._job.cluster} says: {state.text}"
        )
        code = state.code or 1
        # Schedulers end jobs for reasons of their own: time limits, preemption, lost hosts.
        cancelled = state.phase != "failed" or code in (130, 143)
        return TrialEnd(code=code, reason=reason, killed=cancelled or bool(KILLED.search(reason)))

    def stop(self, *, at_once: bool = False) -> None:
        """Have the scheduler end the job, which saves first."""
        if not self._queue.state(self._job).ended:
            self._queue.cancel(self._job)


TrialJob: TypeAlias = LocalJob | QueuedTrial


def end_leftovers(place: TrialFiles) -> None:
    """Wait for the processes that an earlier job of this trial has left; end those that do not end by themselves.

    A killed trial, or the trial of a killed sweep, may still be writing its last checkpoint.
    """
    left = _processes_of(place)
    # The starter lets its ranks save; killed ranks would leave no checkpoint.
    starters = [process for process in left if str(place.spec) in _words(process)]
    processes.send(starters, signal.SIGTERM)
    deadline = time.monotonic() + LEFTOVER_S
    while (left := _processes_of(place)) and time.monotonic() < deadline:
        time.sleep(0.1)
    processes.send(left, signal.SIGKILL)


def _processes_of(place: TrialFiles) -> list[psutil.Process]:
    """Return the processes whose command line names the trial's spec or run folder."""
    mine, words = os.getpid(), {str(place.spec), str(place.run_dir)}
    return [process for process in psutil.process_iter() if process.pid != mine and words & set(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def caller_without_values() -> dict[str, str]:
    """Return the environment without values of a spec: the trial's spec has them, and they would replace its own."""
    return {
        name: value
        for name, value in environment.caller().items()
        if name not in FOREIGN and (not name.startswith(PREFIX) or name in RESERVED)
    }


def _last_error(text: str) -> str:
    """Return the last error that a job has printed, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]
