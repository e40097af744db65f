"""The queue of Slurm, through its own commands: sbatch, scontrol, sacct, scancel."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtrain.core.interfaces.queue import ENDED, Phase, Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError
from mtrain.spec.files import open_file
from mtrain_clusters._slurm import batch, commands
from mtrain_clusters._slurm.commands import SlurmTask
from mtrain_clusters._slurm.options import SlurmOptions

ORDER: tuple[Phase, ...] = ("running", "waiting", "failed", "cancelled", "unknown", "done")
"""The phase of an array is the first of these that one of its jobs has."""
POLL_S = 1.0
"""Seconds between two looks at the output of a job that is followed."""
FEW = 8
"""Most jobs of an array that are named one by one."""
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
        """Run ``sbatch``, and return the job's id; of an array, that of the whole array."""
        output = commands.run(["sbatch", "--parsable", str(request)], folder=submission.folder)
        number = output.strip().partition(";")[0]  # "id;cluster" where there are several clusters
        if not number.isdecimal():
            raise UsageError(f"sbatch: given {output.strip()!r} as the job's id, expected a number")
        return number

    def state(self, job: QueuedJob) -> QueueState:
        """Ask the controller, then the accounting, and at last the output of the job itself.

        Of several jobs that were started with the same batch script, the newest that has not ended counts, or the newest.
        """
        queued = _find_queued(job)
        newest = _ids(job, queued)[-1]
        shown = _state(job, newest)
        for number in (
            number for number in reversed(queued) if number != newest and shown.phase in (*ENDED, "unknown")
        ):
            other = _state(job, number)
            shown = shown if other.phase in (*ENDED, "unknown") else other
        return shown

    def continues(self, job: QueuedJob, number: str) -> bool:
        """Return whether ``sbatch`` was called with the batch script of ``job``, and gave this id."""
        return number.isdecimal() and number in _ids(job, _find_queued(job))

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
            # A job that was requeued, and those that continue it, have an output of their own each.
            for path in [path for number in _ids(job, ()) for path in outputs(job, number)]:
                yield from _new_lines(path, read, whole=ended)
            if ended:
                return
            time.sleep(POLL_S)

    def cancel(self, job: QueuedJob) -> None:
        """Run ``scancel``, which sends SIGTERM to mtrain and its agents, and SIGKILL after Slurm's ``KillWait``."""
        numbers = dict.fromkeys([_checked_id(job), *_find_queued(job)])
        commands.run(["scancel", *numbers], refusal=commands.UNKNOWN_JOB)


def outputs(job: QueuedJob, number: str) -> list[Path]:
    """Return the files of what the job ``number`` has printed so far: one, or one for each job of an array."""
    folder = job.request.parent
    paths = [*folder.glob(f"slurm-{number}.out"), *folder.glob(f"slurm-{number}_*.out")]
    found = {_index(path): path for path in paths}
    return [found[index] for index in sorted(found, key=batch.index_order)]


def _find_queued(job: QueuedJob) -> list[str]:
    """Return the ids of the jobs with the batch script of ``job`` that are in the queue, the oldest first."""
    _checked_id(job)
    return commands.queued_with(job.request, name=batch.job_name(job.name))


def _ids(job: QueuedJob, queued: Sequence[str]) -> list[str]:
    """Return the ids of all jobs that were started with the batch script of ``job``, the oldest first.

    ``queued``: those that the controller has told. The others have printed something into the folder of the script.
    """
    printed = {_number(path) for path in job.request.parent.glob("slurm-*.out")}
    numbers = {_checked_id(job), *queued, *(number for number in printed if number.isdecimal())}
    return sorted(numbers, key=int)


def _checked_id(job: QueuedJob) -> str:
    """Return the id of a job from its record, which may have been changed.

    Raises:
        UsageError: it is no number, which Slurm's commands could take for an option.
    """
    if not job.id.isdecimal():
        raise UsageError(f"{job.request.parent}: the record has the id {job.id!r}, expected a number of Slurm")
    return job.id


def _state(job: QueuedJob, number: str) -> QueueState:
    tasks = commands.current(number) or commands.read_accounting(number) or _last_words(job, number)
    own = None if number == job.id else number
    if not tasks:
        return QueueState(phase="unknown", text=f"Slurm does not know job {number} any more", id=own)
    phase = next(phase for phase in ORDER if phase in {task.phase for task in tasks})
    codes = [task.code for task in tasks if task.code is not None]
    running = [task.nodes for task in tasks if task.phase == "running" and task.nodes]
    return QueueState(
        phase=phase,
        text=_words(sorted(tasks, key=lambda task: batch.index_order(task.index))),
        # One call for all: an array may have a thousand jobs that run.
        hosts=list(dict.fromkeys(commands.host_names(",".join(dict.fromkeys(running))))),
        code=max(codes) if codes and phase in ENDED else None,
        id=own,
    )


def _words(tasks: Sequence[SlurmTask]) -> str:
    """Word the states of a job, or of all jobs of an array: each of a few, else how many have which state, and some of them."""
    if len(tasks) <= FEW:
        return ", ".join(task.text for task in tasks)
    by_state: dict[str, list[str]] = {}
    for task in tasks:
        by_state.setdefault(task.state, []).append(task.index)
    return "; ".join(f"{sum(map(_count, indices)):,} {state} ({_some(indices)})" for state, indices in by_state.items())


def _count(indices: str) -> int:
    """Return how many jobs an entry stands for: those that wait are one entry, such as ``5-7,9%2``."""
    bounds = re.findall(r"(\d+)(?:-(\d+))?", indices.partition("%")[0])
    return sum(int(last or first) - int(first) + 1 for first, last in bounds) or 1


def _some(indices: Sequence[str]) -> str:
    return ", ".join(indices[:FEW]) + (" ..." if len(indices) > FEW else "")


def _number(path: Path) -> str:
    """Return the id of the job that the name of an output file contains."""
    return path.stem.removeprefix("slurm-").partition("_")[0]


def _index(path: Path) -> str:
    """Return the index in an array that the name of an output file contains; empty: none."""
    return path.stem.removeprefix("slurm-").partition("_")[2]


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
    prefix = f"[{index}] " if (index := _index(path)) else ""
    for line in content.decode(errors="replace").splitlines():
        yield prefix + line


def _last_words(job: QueuedJob, number: str) -> list[SlurmTask]:
    """Return how the job ended as its batch script has printed it; empty: it has printed no such line."""
    tasks = []
    for path in outputs(job, number):
        lines = [line for line in _new_lines(path, {}, whole=True) if batch.CODE_LINE in line]
        if lines and (found := re.search(r"(\d+)$", lines[-1])):
            code = int(found[1])
            state = "COMPLETED" if code == 0 else "FAILED"
            tasks.append(SlurmTask(state=state, reason="as the job says", code=code, index=_index(path)))
    return tasks
