"""Run Slurm's commands, and read what they print about jobs."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.core.interfaces.queue import Phase
from mtrain.errors import UsageError

# A busy controller answers after many seconds.
TIMEOUT_S = 120.0
"""Time that a command may take."""
PHASES: Mapping[str, Phase] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"), "waiting"),
    "SPECIAL_EXIT": "waiting",
    **dict.fromkeys(("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED", "SUSPENDED"), "running"),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), "failed"),
    **dict.fromkeys(("PREEMPTED", "REVOKED"), "failed"),
}
"""Job states of Slurm, see "JOB STATE CODES" in squeue(1)."""
UNKNOWN_JOB = "Invalid job id"
_SIGNALLED = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmTask:
    """The facts that Slurm knows about a job, or about one job of an array."""

    state: str
    """In Slurm's word: RUNNING."""
    reason: str = ""
    """Why it waits, in Slurm's word: Resources."""
    nodes: str = ""
    """Its hosts, as Slurm writes them: ``node[1-3]``."""
    code: int | None = None
    """Exit code, 128 and the number of the signal for a job that a signal has ended."""
    index: str = ""
    """Its index in an array, or several indices of jobs that still wait; empty: no array."""

    @property
    def phase(self) -> Phase:
        """Return what it does now."""
        return PHASES.get(self.state, "unknown")

    @property
    def text(self) -> str:
        """Return the state as Slurm's commands show it."""
        text = f"{self.state} ({self.reason})" if self.reason else self.state
        return f"{self.index}: {text}" if self.index else text


def run(argv: Sequence[str], *, folder: Path | None = None, refusal: str = "") -> str:
    """Return the output of a command of Slurm; an output of "" where it fails and its message contains ``refusal``.

    Raises:
        UsageError: it is not installed here, or it fails.
    """
    if shutil.which(argv[0]) is None:
        raise UsageError(
            f"{argv[0]} is not installed here; use a machine that belongs to Slurm, such as its login host"
        )
    try:
        process = subprocess.run(  # noqa: S603
            list(argv), cwd=folder, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{argv[0]} has not answered for {TIMEOUT_S:g} s; see `scontrol ping`") from None
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be run in {folder or Path.cwd()}: {error.strerror or error}") from error
    if process.returncode == 0:
        return process.stdout
    words = " / ".join(line.strip() for line in process.stderr.splitlines() if line.strip())
    if refusal and refusal in words:
        return ""
    raise UsageError(f"{argv[0]} refuses: {words or f'exit code {process.returncode}'}")


def current(number: str) -> list[SlurmTask]:
    """Return what the controller knows about a job, one entry for each job of an array; empty: it has forgotten it."""
    output = run(["scontrol", "--oneliner", "show", "job", number], refusal=UNKNOWN_JOB)
    return [_read_task(line) for line in output.splitlines() if "JobState=" in line]


def queued_with(request: Path, *, name: str) -> list[str]:
    """Return the ids of the jobs in the queue whose batch script is ``request``, whoever submitted them.

    ``name``: that of the jobs, by which the controller chooses among all.
    """
    output = run(["squeue", "--noheader", f"--name={name}", "--format=%F|%o"])
    rows = (line.strip().partition("|") for line in output.splitlines())
    return sorted({number for number, _, script in rows if number.isdecimal() and Path(script) == request}, key=int)


def read_accounting(number: str) -> list[SlurmTask]:
    """Return what the accounting of Slurm knows about a job; empty: nothing, or there is no accounting."""
    fields = "JobID,State,NodeList,ExitCode"
    try:
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, "--format", fields]
        output = run(argv)
    except UsageError:  # Many sites have none, and then sacct fails.
        return []
    rows = (line.split("|") for line in output.splitlines())
    return [
        SlurmTask(
            state=state.split()[0],  # "CANCELLED by 1000"
            nodes="" if nodes == "None assigned" else nodes,
            code=_code(code) if PHASES.get(state.split()[0]) in ("done", "failed", "cancelled") else None,
            index=job.partition("_")[2].strip("[]"),
        )
        for job, state, nodes, code in (row for row in rows if len(row) == 4 and row[1].split())
    ]


def host_names(nodes: str) -> list[str]:
    """Return the names in Slurm's short form of a list of hosts, ``node[1-3]``."""
    return run(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


def _read_task(line: str) -> SlurmTask:
    """Read one line of ``scontrol --oneliner show job``."""
    # The job's name comes before all of these and is a single word, see ``batch.directives``.
    fields = dict(re.findall(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode|ArrayTaskId)=(\S*)", line))
    state = fields["JobState"]
    phase = PHASES.get(state, "unknown")
    reason, nodes = fields.get("Reason", ""), fields.get("NodeList", "")
    return SlurmTask(
        state=state,
        reason="" if reason == "None" else reason,
        nodes="" if nodes in ("(null)", "None") else nodes,
        code=_code(fields.get("ExitCode", "")) if phase in ("done", "failed", "cancelled") else None,
        index=fields.get("ArrayTaskId", ""),
    )


def _code(text: str) -> int | None:
    """Read Slurm's "exit code:signal"."""
    code, _, signal = text.partition(":")
    if not code.isdecimal():
        return None
    return _SIGNALLED + int(signal) if signal.isdecimal() and int(signal) else int(code)
