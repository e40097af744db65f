"""Run Slurm's commands, and read what they print about jobs."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.core.interfaces.queue import ENDED, Phase
from mtrain.errors import UsageError

# A busy controller answers after many seconds.
TIMEOUT_S = 120.0
"""Time that a command may take."""
PHASES: Mapping[str, Phase] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"), "waiting"),
    **dict.fromkeys(("SPECIAL_EXIT", "EXPEDITING"), "waiting"),
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
    """The facts that Slurm knows about a job."""

    state: str
    """In Slurm's word: RUNNING."""
    reason: str = ""
    """Why it waits, in Slurm's word: Resources."""
    nodes: str = ""
    """Its hosts, as Slurm writes them: ``node[1-3]``."""
    code: int | None = None
    """Exit code, 128 and the number of the signal for a job that a signal has ended."""

    @property
    def phase(self) -> Phase:
        """Return what it does now."""
        return PHASES.get(self.state, "unknown")

    @property
    def text(self) -> str:
        """Return the state as Slurm's commands show it."""
        return f"{self.state} ({self.reason})" if self.reason else self.state


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


def current(number: str) -> SlurmTask | None:
    """Return what the controller knows about a job; None: it has forgotten it."""
    output = run(["scontrol", "--oneliner", "show", "job", number], refusal=UNKNOWN_JOB)
    return next((_read_task(line) for line in output.splitlines() if "JobState=" in line), None)


def read_accounting(number: str) -> SlurmTask | None:
    """Return what the accounting of Slurm knows about a job; None: nothing, or there is no accounting."""
    fields = "State,NodeList,ExitCode"
    try:
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, "--format", fields]
        output = run(argv)
    except UsageError:  # Many sites have none, and then sacct fails.
        return None
    for row in (line.split("|") for line in output.splitlines()):
        if len(row) == 3 and row[0].split():
            state = row[0].split()[0]  # "CANCELLED by 1000"
            return SlurmTask(state=state, nodes="" if row[1] == "None assigned" else row[1], code=_code(row[2], state))
    return None


def host_names(nodes: str) -> list[str]:
    """Return the names in Slurm's short form of a list of hosts, ``node[1-3]``."""
    return run(["scontrol", "show", "hostnames", nodes]).split() if nodes else []


def _read_task(line: str) -> SlurmTask:
    """Read one line of ``scontrol --oneliner show job``."""
    # The job's name comes before all of these and is a single word, see ``batch.directives``.
    fields = dict(re.findall(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode)=(\S*)", line))
    state = fields["JobState"]
    reason, nodes = fields.get("Reason", ""), fields.get("NodeList", "")
    return SlurmTask(
        state=state,
        reason="" if reason == "None" else reason,
        nodes="" if nodes in ("(null)", "None") else nodes,
        code=_code(fields.get("ExitCode", ""), state),
    )


def _code(text: str, state: str) -> int | None:
    """Read Slurm's "exit code:signal" of a job in this state; None: it has not ended."""
    code, _, signal = text.partition(":")
    if not code.isdecimal() or PHASES.get(state) not in ENDED:
        return None
    return _SIGNALLED + int(signal) if signal.isdecimal() and int(signal) else int(code)
