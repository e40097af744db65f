"""Running a plan: start the commands of this host, show progress, stop everything at the first failure, start again.

The starters of the frameworks cannot be trusted with failure; this process watches the ranks itself, and leaves no
process behind whichever way it ends.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mtrain.core import checkpoint, processes, runfolder, verdict
from mtrain.core.errors import LaunchError
from mtrain.core.interfaces import Command
from mtrain.core.plan import Plan
from mtrain.core.processes import Requests
from mtrain.core.report_console import Display
from mtrain.core.report_history import Record, Tail
from mtrain.core.runfolder import RunFolder
from mtrain.core.verdict import Verdict

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""By the request that ended a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    poll_s: float = 0.1
    """Between two looks at the ranks."""
    failure_s: float = 10.0
    """For the other ranks to end by themselves after the first failure."""
    leftover_s: float = 5.0
    """For processes that outlive their starter, before they are killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one attempt ended."""

    status: int
    """Exit status of the command; negative: signal."""
    last: Record | None
    """The "end" record, if rank 0 wrote one."""
    log: str
    """What the command itself has printed."""


@dataclass(kw_only=True)
class Job:
    """What ``run`` needs besides the plan."""

    display: Display
    environ: Mapping[str, str]
    """The cleaned environment of the caller, to which each command's own variables are added."""
    node: int = 0
    """Which host of the plan this machine is; only its command is started here."""
    replan: Callable[[Path | None], Plan] | None = None
    """A new plan that resumes from a checkpoint (None: from the beginning), for ``cluster.max_restarts``."""
    patience: Patience = field(default_factory=Patience)
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Where the reason of a failure is printed."""


def run(plan: Plan, job: Job) -> int:
    """Run this host's part of ``plan`` to its end. Returns the exit code: 0, 1, 2, 130 or 143.

    Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once. Call it from the main thread.

    Raises:
        LaunchError: the command cannot be started at all.
        UsageError: another starter runs a job in this folder.
    """
    run_folder = RunFolder(plan.run_dir, plan.log_dir)
    run_folder.make()
    attempts = 0
    try:
        with runfolder.taken(run_folder, node=job.node), Requests() as requests, processes.adopting_orphans():
            while True:
                attempts += 1
                ending = _Attempt(plan, job, run_folder, requests).run()
                told = _explain(plan, job, run_folder, requests, ending)
                if told.code != 1 or requests.count or attempts > plan.max_restarts or job.replan is None:
                    break
                plan = _restarted(job.replan, job, run_folder, told, left=plan.max_restarts - attempts)
    finally:
        job.display.close()
    if told.text:
        print(told.text, file=job.stream, flush=True)
    return told.code


def _restarted(
    replan: Callable[[Path | None], Plan], job: Job, run_folder: RunFolder, told: Verdict, *, left: int
) -> Plan:
    """The plan of the next attempt."""
    newest = checkpoint.newest(run_folder.checkpoints)
    source = f"from {newest.name}" if newest else "from the beginning: there is no checkpoint yet"
    job.display.note(f"{told.headline}; starting again {source} ({left} more restarts allowed)")
    return replan(newest)


def _explain(plan: Plan, job: Job, run_folder: RunFolder, requests: Requests, ending: Ending) -> Verdict:
    """Exit code, and what to tell when the job did not end by itself."""
    reason = (ending.last or {}).get("reason")
    failures = verdict.real_failures(run_folder)
    if ending.status == 0 and reason != "interrupted":
        return Verdict(code=0, headline="done", text="")
    on_another_host = job.node > 0 and verdict.asked_to_end(run_folder)
    if (reason == "interrupted" and not failures) or on_another_host:
        text = f"ended, state saved; go on with --resume {run_folder.path}"
        return Verdict(code=EXIT_CODES[requests.first or signal.SIGTERM], headline="ended", text=text)
    refused = any(failure.get("expected") for failure in failures)
    if requests.first is not None and (requests.count > 1 or not refused):
        newest = checkpoint.newest(run_folder.checkpoints)
        kept = f"go on from {newest.name} with --resume {run_folder.path}" if newest else "there is no checkpoint"
        return Verdict(
            code=EXIT_CODES[requests.first], headline="ended", text=f"ended before the state was saved; {kept}"
        )
    return verdict.judge(run_folder, plan.launcher.deaths(ending.log, ending.status), status=ending.status)


class _Attempt:
    """One start of this host's command, watched to its end."""

    def __init__(self, plan: Plan, job: Job, run_folder: RunFolder, requests: Requests) -> None:
        self._plan = plan
        self._job = job
        self._run = run_folder
        self._requests = requests
        self._spare = frozenset(process.pid for process in processes.descendants())
        self._last: Record | None = None
        self._answered = 0
        self._deadline: float | None = None

    def run(self) -> Ending:
        """Start, watch, clean up."""
        runfolder.set_aside_failures(self._run)
        log = self._run.starter_log
        written = log.stat().st_size if log.exists() else 0
        tail = Tail(self._run.metrics)
        command = self._plan.commands[self._job.node]
        process = self._start(command, log)
        try:
            while process.poll() is None:
                self._show(tail)
                self._answer(process.pid, command)
                self._stop_after_failure()
                processes.reap(spare=process.pid)
                time.sleep(self._job.patience.poll_s)
        finally:
            ended = process.poll() is not None
            processes.end_all(spare=self._spare, grace_s=self._job.patience.leftover_s if ended else 0.0)
            process.wait()
            processes.reap(spare=process.pid)
        self._show(tail)
        with log.open("rb") as file:
            file.seek(written)
            return Ending(status=process.returncode, last=self._last, log=file.read().decode(errors="replace"))

    def _start(self, command: Command, log: Path) -> "subprocess.Popen[bytes]":
        try:
            return processes.start(command.argv, env={**self._job.environ, **command.env}, log=log)
        except OSError as error:
            raise LaunchError(
                f"{command.argv[0]} cannot be started: {error.strerror or error}; "
                "set backend.python to the interpreter of the ranks"
            ) from error

    def _show(self, tail: Tail) -> None:
        for record in tail.read():
            if record.get("kind") == "end":
                self._last = record
            self._job.display.record(record)
        self._job.display.tick()

    def _answer(self, leader: int, command: Command) -> None:
        """Pass a request to end on: first a polite one to the ranks alone, then the end of everything."""
        if self._requests.count == self._answered:
            return
        self._answered = self._requests.count
        if self._answered > 1:
            processes.end_all(spare=self._spare, grace_s=0.0)
            return
        again = "press Ctrl-C again" if self._requests.first == signal.SIGINT else "send SIGTERM again"
        self._job.display.note(f"saving and ending ... ({again} to end at once)")
        # The ranks, not the agent: it would end them, and their loader processes, after a time of its own.
        ranks = processes.children_with(leader, _worker_arguments(command)) if self._plan.launcher.agent else []
        processes.send(ranks or processes.by_id(leader), signal.SIGTERM)

    def _stop_after_failure(self) -> None:
        """Once a rank has failed the others have ``failure_s`` to end; a collective may block them for ever."""
        if self._deadline is None:
            if verdict.real_failures(self._run):
                self._deadline = time.monotonic() + self._job.patience.failure_s
        elif time.monotonic() > self._deadline:
            processes.end_all(spare=self._spare, grace_s=0.0)


def _worker_arguments(command: Command) -> Sequence[str]:
    """What the ranks' own command line ends with."""
    return command.argv[list(command.argv).index("--run-dir") :] if "--run-dir" in command.argv else command.argv[-1:]
