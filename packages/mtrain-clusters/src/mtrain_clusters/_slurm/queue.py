"""The queue of Slurm, through its own commands: sbatch, scontrol, sacct, scancel."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from mtrain.core.interfaces.queue import ENDED, Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError
from mtrain.spec.files import open_file
from mtrain_clusters._slurm import batch, commands
from mtrain_clusters._slurm.commands import SlurmTask
from mtrain_clusters._slurm.options import SlurmOptions

POLL_S = 1.0
"""Seconds between two looks at the output of a job that is followed."""
ASK_S = 5.0
"""Seconds between two questions to the controller while a job is followed."""


class SlurmQueue(Queue):
    """The queue of the Slurm that this machine belongs to."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options

    @property
    def suffix(self) -> str:
        """Return the suffix of the batch script."""
        return ".sbatch"

    def request(self, submission: Submission) -> str:
        """Return the batch script."""
        return batch.script(submission, self.options)

    def standalone_request(self, submission: Submission) -> str:
        """Return the batch script with the spec in it, so that it runs as it is."""
        return batch.script(submission, self.options, has_spec=True)

    def submit(self, submission: Submission, request: Path) -> str:
        """Run ``sbatch``, and return the job's id."""
        output = commands.run(["sbatch", "--parsable", str(request)], folder=submission.folder)
        number = output.strip().partition(";")[0]  # "id;cluster" where there are several clusters
        if not number.isdecimal():
            raise UsageError(f"sbatch: given {output.strip()!r} as the job's id, expected a number")
        return number

    def state(self, job: QueuedJob) -> QueueState:
        """Ask the controller, then the accounting, and at last the output of the job itself."""
        number = _checked_id(job)
        task = commands.current(number) or commands.read_accounting(number) or _last_words(job)
        if task is None:
            return QueueState(phase="unknown", text=f"Slurm does not know job {number} any more")
        hosts = commands.host_names(task.nodes) if task.phase == "running" else []
        return QueueState(phase=task.phase, text=task.text, hosts=hosts, code=task.code)

    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        """Yield the lines of the job's output."""
        read: dict[Path, int] = {}
        asked = -ASK_S
        while True:
            # Asked before the file is read, so that no line of a job that has just ended is missed.
            if ended := not follow:
                pass
            elif time.monotonic() - asked >= ASK_S:
                asked = time.monotonic()
                phase = self.state(job).phase
                # A newer Slurm may have another state, which is no end while the controller knows the job.
                ended = phase in ENDED or (phase == "unknown" and commands.current(job.id) is None)
            yield from _new_lines(_output(job), read, whole=ended)
            if ended:
                return
            time.sleep(POLL_S)

    def cancel(self, job: QueuedJob) -> None:
        """Run ``scancel``, which sends SIGTERM to mtrain and its agents, and SIGKILL after Slurm's ``KillWait``."""
        commands.run(["scancel", _checked_id(job)], refusal=commands.UNKNOWN_JOB)


def _output(job: QueuedJob) -> Path:
    """Return the file of what the job has printed."""
    return job.request.with_name(f"slurm-{_checked_id(job)}.out")


def _checked_id(job: QueuedJob) -> str:
    """Return the id of a job from its record, which may have been changed.

    Raises:
        UsageError: it is no number, which Slurm's commands could take for an option.
    """
    if not job.id.isdecimal():
        raise UsageError(f"{job.request.parent}: the record has the id {job.id!r}, expected a number of Slurm")
    return job.id


def _new_lines(path: Path, read: dict[Path, int], *, whole: bool) -> Iterator[str]:
    """Yield the lines that were added since the last call. ``whole``: also a last line without an end."""
    try:
        with open_file(path) as file:
            file.seek(read.get(path, 0))
            content = file.read()
    except OSError:  # A network file system may lose the file for a moment.
        return
    if not whole:
        content = content[: content.rfind(b"\n") + 1]
    read[path] = read.get(path, 0) + len(content)
    yield from content.decode(errors="replace").splitlines()


def _last_words(job: QueuedJob) -> SlurmTask | None:
    """Return how the job ended as its batch script has printed it; None: it has printed no such line."""
    lines = [line for line in _new_lines(_output(job), {}, whole=True) if batch.CODE_LINE in line]
    if lines and (found := re.search(r"(\d+)$", lines[-1])):
        code = int(found[1])
        return SlurmTask(state="COMPLETED" if code == 0 else "FAILED", code=code)
    return None
