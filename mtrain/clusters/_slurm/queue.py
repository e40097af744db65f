"""The queue of Slurm, through its own commands: sbatch, scontrol, sacct, scancel."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from mtrain.clusters._slurm import batch, commands
from mtrain.clusters._slurm.commands import Task
from mtrain.clusters._slurm.options import SlurmOptions
from mtrain.core.queue import ENDED, Phase, Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError

ORDER: tuple[Phase, ...] = ("running", "waiting", "failed", "cancelled", "unknown", "done")
"""The phase of an array is the first of these that one of its jobs has."""
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

    def submit(self, submission: Submission, request: Path) -> str:
        """Run ``sbatch``, and return the job's id; of an array, that of the whole array."""
        output = commands.run(["sbatch", "--parsable", str(request)], folder=submission.folder)
        number = output.strip().partition(";")[0]  # "id;cluster" where there are several clusters
        if not number.isdecimal():
            raise UsageError(f"sbatch: given {output.strip()!r} as the job's id, expected a number")
        return number

    def state(self, job: QueuedJob) -> QueueState:
        """Ask the controller, then the accounting, and at last the output of the job itself."""
        tasks = commands.current(job.id) or commands.recorded(job.id) or _last_words(job)
        if not tasks:
            return QueueState(phase="unknown", text=f"Slurm does not know job {job.id} any more")
        phase = next(phase for phase in ORDER if phase in {task.phase for task in tasks})
        codes = [task.code for task in tasks if task.code is not None]
        return QueueState(
            phase=phase,
            text=", ".join(task.text for task in sorted(tasks, key=lambda task: batch.index_order(task.index))),
            hosts=[name for task in tasks if task.phase == "running" for name in commands.host_names(task.nodes)],
            code=max(codes) if codes and phase in ENDED else None,
        )

    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        """Yield the lines of the job's output; those of an array begin with the index in brackets."""
        read: dict[Path, int] = {}
        asked = -ASK_S
        while True:
            # Asked before the files are read, so that no line of a job that has just ended is missed.
            if ended := not follow:
                pass
            elif time.monotonic() - asked >= ASK_S:
                asked = time.monotonic()
                ended = self.state(job).phase in (*ENDED, "unknown")
            for path in outputs(job):
                yield from _new_lines(path, read, whole=ended)
            if ended:
                return
            time.sleep(POLL_S)

    def cancel(self, job: QueuedJob) -> None:
        """Run ``scancel``, which sends SIGTERM to mtrain and its agents, and SIGKILL after Slurm's ``KillWait``."""
        commands.run(["scancel", job.id], refusal=commands.UNKNOWN_JOB)


def outputs(job: QueuedJob) -> list[Path]:
    """Return the files of what the job has printed so far: one, or one for each job of an array."""
    folder = job.request.parent
    paths = [*folder.glob(f"slurm-{job.id}.out"), *folder.glob(f"slurm-{job.id}_*.out")]
    found = {_index(path): path for path in paths}
    return [found[index] for index in sorted(found, key=batch.index_order)]


def _index(path: Path) -> str:
    """Return the index in an array that the name of an output file contains; empty: none."""
    return path.stem.removeprefix("slurm-").partition("_")[2]


def _new_lines(path: Path, read: dict[Path, int], *, whole: bool) -> Iterator[str]:
    """Yield the lines that were added since the last call. ``whole``: also a last line without an end."""
    try:
        with path.open("rb") as file:
            file.seek(read.get(path, 0))
            content = file.read()
    except OSError:  # A network file system may lose the file for a moment.
        return
    if not whole:
        content = content[: content.rfind(b"\n") + 1]
    read[path] = read.get(path, 0) + len(content)
    prefix = f"[{index}] " if (index := _index(path)) else ""
    for line in content.decode(errors="replace").splitlines():
        yield prefix + line


def _last_words(job: QueuedJob) -> list[Task]:
    """Return how the job ended as its batch script has printed it; empty: it has printed no such line."""
    tasks = []
    for path in outputs(job):
        lines = [line for line in _new_lines(path, {}, whole=True) if batch.CODE_LINE in line]
        if lines and (code := re.search(r"(\d+)$", lines[-1])):
            number = int(code[1])
            state = "COMPLETED" if number == 0 else "FAILED"
            tasks.append(Task(state=state, reason="as the job says", code=number, index=_index(path)))
    return tasks
