"""Running a plan: start the commands of this host, show progress, stop everything at the first failure, start again.

The starters of the frameworks cannot be trusted with failure; this process watches the ranks itself, and leaves no process
behind whichever way it ends.
"""

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mtrain.core import checkpoint, processes, verdict
from mtrain.core.plan import Plan
from mtrain.core.processes import Requests
from mtrain.core.report_console import Display
from mtrain.core.report_history import Record
from mtrain.core.runfolder import RunFolder
from mtrain.core.verdict import Verdict

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
ASKED_TO_END = 143
"""Exit code of a rank that was told to end and has saved its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    poll_s: float = 0.1
    """Between two looks at the ranks."""
    failure_s: float = 10.0
    """For the other ranks to end by themselves after the first failure."""
    leftover_s: float = 5.0
    """For processes that outlive their starter, before they are killed."""


@dataclass(kw_only=True, slots=True)
class Ending:
    """How one attempt ended."""

    status: int
    """Exit status of the command; negative: signal."""
    last: Record | None
    """The "end" record, if rank 0 wrote one."""


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

    Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once.

    Raises:
        LaunchError: the command cannot be started at all.
    """
    run_folder = RunFolder(plan.run_dir, plan.log_dir)
    run_folder.make()
    try:
        with Requests() as requests, processes.adopting_orphans():
            while True:
                ending = _Attempt(plan, job, run_folder, requests).run()
                code, told = _explain(plan, run_folder, requests, ending)
                again = None if told is None or requests.count else _next_plan(plan, job, run_folder, told)
                if again is None:
                    break
                plan = again
    finally:
        job.display.close()
    if told is not None:
        print(told.text, file=job.stream, flush=True)
    return code


def _explain(plan: Plan, run_folder: RunFolder, requests: Requests, ending: Ending) -> tuple[int, Verdict | None]:
    """Exit code, and what to tell when something went wrong."""
    reason = (ending.last or {}).get("reason")
    if ending.status == 0 and reason != "interrupted":
        return 0, None
    failed = bool(verdict.real_failures(run_folder))
    if reason == "interrupted" and not failed:
        saved = Verdict(code=0, headline="", text=f"ended, state saved; go on with: mtrain --resume {run_folder.path}")
        return EXIT_CODES.get(requests.first or signal.SIGTERM, ASKED_TO_END), _printed(saved)
    if requests.count:
        newest = checkpoint.newest(run_folder.checkpoints)
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
        ended = Verdict(code=0, headline="", text=f"ended before the state was saved; {kept}")
        return EXIT_CODES[requests.first or signal.SIGTERM], _printed(ended)
    log = run_folder.starter_log.read_text(errors="replace") if run_folder.starter_log.exists() else ""
    told = verdict.judge(run_folder, plan.launcher.deaths(_last_attempt(log), ending.status), status=ending.status)
    return told.code, told


def _printed(told: Verdict) -> Verdict:
    return told


def _next_plan(plan: Plan, job: Job, run_folder: RunFolder, told: Verdict) -> Plan | None:
    """The plan to go on with after a failure; None: there is no further attempt."""
    return None
