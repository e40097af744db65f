"""Running a plan on this host alone: start its command, show progress, stop everything at the first failure, start again.

The starters of the frameworks cannot be trusted with failure; this process watches the ranks itself, and leaves no
process behind whichever way it ends. ``mtrain.cluster`` does the same on several hosts.
"""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from mtrain.core.checkpoint import store
from mtrain.jobs.attempt import Asked, Attempt, Patience
from mtrain.jobs.plan import Plan
from mtrain.report.console import Display
from mtrain.system import diagnosis, processes, runfolder
from mtrain.system.diagnosis import Ending, Verdict
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

__all__ = ["EXIT_CODES", "Job", "Patience", "Traces", "explain", "run"]

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""By the request that ended a job."""
NOTHING = "ended before anything was started"
"""What is told then, where it came so early."""


@dataclass(kw_only=True)
class Job:
    """What ``run`` needs besides the plan."""

    display: Display
    environ: Mapping[str, str]
    """The cleaned environment of the caller, to which each command's own variables are added."""
    replan: Callable[[Path | None], Plan] | None = None
    """A new plan that resumes from a checkpoint (None: from the beginning), for ``cluster.max_restarts``."""
    patience: Patience = field(default_factory=Patience)
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Where the reason of a failure is printed."""


def run(plan: Plan, job: Job) -> int:
    """Run ``plan``, which is of one host, to its end. Returns the exit code: 0, 1, 2, 130 or 143.

    Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once. Call it from the main thread.

    Raises:
        LaunchError: the command cannot be started at all.
        UsageError: another starter runs a job in this folder.
    """
    run_folder = RunFolder(plan.run_dir, plan.log_dir)
    run_folder.make()
    attempts = 0
    try:
        with runfolder.taken(run_folder), Requests() as requests, processes.adopting_orphans():
            while True:
                attempts += 1
                ending = _attempt(plan, job, run_folder, requests).run()
                told = _explain(plan, run_folder, requests, ending)
                if told.code != 1 or requests.count or attempts > plan.max_restarts or job.replan is None:
                    break
                plan = _restarted(job.replan, job, run_folder, told, left=plan.max_restarts - attempts)
    finally:
        job.display.close()
    if told.text:
        print(told.text, file=job.stream, flush=True)
    return told.code


def _attempt(plan: Plan, job: Job, run_folder: RunFolder, requests: Requests) -> Attempt:
    return Attempt(
        command=plan.commands[0],
        run_folder=run_folder,
        environ=job.environ,
        starts_ranks=plan.launcher.agent,
        listener=job.display,
        asked=requests,
        patience=job.patience,
    )


def _restarted(
    replan: Callable[[Path | None], Plan], job: Job, run_folder: RunFolder, told: Verdict, *, left: int
) -> Plan:
    """The plan of the next attempt."""
    newest = store.newest(run_folder.checkpoints)
    source = f"from {newest.name}" if newest else "from the beginning: there is no checkpoint yet"
    job.display.note(f"{told.headline}; starting again {source} ({left} more restarts allowed)")
    return replan(newest)


def _explain(plan: Plan, run_folder: RunFolder, requests: Requests, ending: Ending) -> Verdict:
    def newest() -> str | None:
        found = store.newest(run_folder.checkpoints)
        return found.name if found else None

    failures = diagnosis.real_failures(run_folder)
    killed = plan.launcher.agent and diagnosis.was_killed(ending.status, ended_here=ending.ended_here)

    def judge() -> Verdict:
        if killed:
            return diagnosis.of_killed_starter(ending.status, diagnosis.starter_log(run_folder, ending))
        return diagnosis.judge(run_folder, plan.launcher.deaths(ending.log, ending.status), ending)

    return explain(
        Traces(
            ok=ending.status == 0,
            reason=(ending.last or {}).get("reason"),
            failures=failures,
            failed_at=failures[0].get("time") if failures else None,
            run_dir=run_folder.path,
            starter_killed=killed,
        ),
        requests,
        newest=newest,
        judge=judge,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """What an attempt has left, as far as the exit code depends on it."""

    ok: bool
    """Whether every command ended with 0."""
    reason: str | None
    """Of the "end" record, if rank 0 wrote one."""
    failures: Sequence[Mapping[str, Any]]
    """Of ranks that were not asked to end."""
    run_dir: Path
    failed_at: float | None = None
    """When the first of these failures was, in seconds since 1970 by this host's clock."""
    starter_killed: bool = False
    """Whether something outside the job killed the starter of the ranks. Ranks then save and end as if they had been asked to."""


def explain(
    traces: Traces, requests: Asked, *, newest: Callable[[], str | None], judge: Callable[[], Verdict]
) -> Verdict:
    """Exit code, and what to tell when the job did not end by itself.

    ``newest``: name of the newest intact checkpoint. ``judge``: the verdict on a failure.
    """
    if traces.ok and traces.reason != "interrupted":
        return Verdict(code=0, headline="done", text="")
    go_on = f"--resume {shlex.quote(str(traces.run_dir))}"
    if traces.starter_killed and requests.first is None:
        told = judge()
        if traces.reason != "interrupted":
            return told
        return replace(told, text=f"the ranks have saved their state; go on with {go_on}\n{told.text}")
    if traces.reason == "interrupted" and not traces.failures:
        code = EXIT_CODES[requests.first or signal.SIGTERM]
        return Verdict(code=code, headline="ended", text=f"ended, state saved; go on with {go_on}")
    if _failed_before(traces, requests):  # who then presses Ctrl-C wants to hear why all the same
        return judge()
    refused = any(failure.get("expected") for failure in traces.failures)
    if requests.first is not None and (requests.count > 1 or not refused):
        name = newest()
        kept = f"go on from {name} with {go_on}" if name else "there is no checkpoint"
        return Verdict(
            code=EXIT_CODES[requests.first], headline="ended", text=f"ended before the state was saved; {kept}"
        )
    return judge()


def _failed_before(traces: Traces, requests: Asked) -> bool:
    """Whether a rank had failed before anybody asked for the end."""
    return traces.failed_at is not None and requests.first_at is not None and traces.failed_at < requests.first_at
