"""Run the plan of a job on one host: start its command, show progress, end everything at the first failure, restart.

The frameworks' starters do not handle failures reliably, so this process watches the ranks itself. However it ends, it
leaves no process running. ``mtrain.cluster`` does the same on several hosts.
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
"""Exit code of mtrain, by the signal that asked for the end of a job."""
NOTHING = "ended before anything was started"
"""Message for a request to end that came before anything was started."""


@dataclass(kw_only=True)
class Job:
    """The parameters of ``run`` besides the plan."""

    display: Display
    environ: Mapping[str, str]
    """The cleaned environment of the caller, to which each command's own variables are added."""
    replan: Callable[[Path | None], Plan] | None = None
    """Makes the plan of a restart from a checkpoint (None: from the beginning), for ``cluster.max_restarts``."""
    patience: Patience = field(default_factory=Patience)
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Stream on which the reason of a failure is printed."""


def run(plan: Plan, job: Job) -> int:
    """Run a plan with one host to its end, and return the exit code: 0, 1, 2, 130 or 143.

    Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once. It must be called from the main
    thread, where Python handles signals.

    Raises:
        LaunchError: the command cannot be started at all.
        UsageError: another process runs a job in this folder.
    """
    run_folder = RunFolder(plan.run_dir, plan.log_dir)
    run_folder.make()
    attempts = 0
    try:
        with runfolder.taken(run_folder), Requests() as requests, processes.adopting_orphans():
            while True:
                attempts += 1
                ending = _attempt(plan, job, run_folder, requests).run()
                verdict = _explain(plan, run_folder, requests, ending)
                if verdict.code != 1 or requests.count or attempts > plan.max_restarts or job.replan is None:
                    break
                plan = _restarted(job.replan, job, run_folder, verdict, restarts_left=plan.max_restarts - attempts)
    finally:
        job.display.close()
    if verdict.text:
        print(verdict.text, file=job.stream, flush=True)
    return verdict.code


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
    replan: Callable[[Path | None], Plan], job: Job, run_folder: RunFolder, verdict: Verdict, *, restarts_left: int
) -> Plan:
    """Announce a restart from the newest intact checkpoint, and return its plan."""
    newest = store.newest(run_folder.checkpoints)
    source = f"from {newest.name}" if newest else "from the beginning: there is no checkpoint yet"
    job.display.note(f"{verdict.headline}; starting again {source} ({restarts_left} more restarts allowed)")
    return replan(newest)


def _explain(plan: Plan, run_folder: RunFolder, requests: Requests, ending: Ending) -> Verdict:
    def newest() -> str | None:
        checkpoint = store.newest(run_folder.checkpoints)
        return checkpoint.name if checkpoint else None

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
    """The facts about an ended attempt that determine the exit code."""

    ok: bool
    """Whether every command ended with exit status 0."""
    reason: str | None
    """Reason in the "end" record; None if rank 0 wrote no such record."""
    failures: Sequence[Mapping[str, Any]]
    """Failures of ranks that were not asked to end."""
    run_dir: Path
    failed_at: float | None = None
    """Time of the first of these failures, in seconds since 1970 by this host's clock."""
    starter_killed: bool = False
    """Whether something outside the job killed the starter of the ranks. Ranks then save and end as if asked to."""


def explain(
    traces: Traces, requests: Asked, *, newest: Callable[[], str | None], judge: Callable[[], Verdict]
) -> Verdict:
    """Determine the exit code of an attempt, and the message if the job did not end by itself.

    ``newest`` returns the name of the newest intact checkpoint. ``judge`` explains a failure. Both are called only if
    they are needed, because they read files.
    """
    if traces.ok and traces.reason != "interrupted":
        return Verdict(code=0, headline="done", text="")
    go_on = f"--resume {shlex.quote(str(traces.run_dir))}"
    if traces.starter_killed and requests.first is None:
        verdict = judge()
        if traces.reason != "interrupted":
            return verdict
        return replace(verdict, text=f"the ranks have saved their state; go on with {go_on}\n{verdict.text}")
    if traces.reason == "interrupted" and not traces.failures:
        code = EXIT_CODES[requests.first or signal.SIGTERM]
        return Verdict(code=code, headline="ended", text=f"ended, state saved; go on with {go_on}")
    if _failed_before(traces, requests):  # The user who then pressed Ctrl-C still needs the reason of the failure.
        return judge()
    refused = any(failure.get("expected") for failure in traces.failures)
    if requests.first is not None and (requests.count > 1 or not refused):
        name = newest()
        way_on = f"go on from {name} with {go_on}" if name else "there is no checkpoint"
        return Verdict(
            code=EXIT_CODES[requests.first], headline="ended", text=f"ended before the state was saved; {way_on}"
        )
    return judge()


def _failed_before(traces: Traces, requests: Asked) -> bool:
    """Return whether a rank had failed before the first request to end."""
    return traces.failed_at is not None and requests.first_at is not None and traces.failed_at < requests.first_at
