"""Jobs in the queue of a scheduler: given to it, found again, and their progress in words."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.commands import results
from mtrain.commands.results import TrainResult
from mtrain.commands.training_request import TrainRequest
from mtrain.core.interfaces.queue import Queue, QueuedJob, QueueState
from mtrain.errors import UsageError
from mtrain.jobs import resumed_spec, start, submission
from mtrain.spec.config import Given
from mtrain.spec.files import MAX_OWN_BYTES, read_text
from mtrain.system.resuming import IF_ANY

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that was given to a scheduler."""

    job: QueuedJob
    base: Path
    """Folder of the runs: ``report.dir``."""

    @property
    def id(self) -> str:
        """Return the scheduler's id of the job."""
        return self.job.id

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.job.name

    @property
    def request(self) -> str:
        """Return the text of the file that was handed to the scheduler."""
        return read_text(self.job.request, limit=MAX_OWN_BYTES)

    def state(self) -> QueueState:
        """Ask the scheduler for the state of the job.

        Raises:
            UsageError: the scheduler cannot be reached.
        """
        return self._queue().state(self.job)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines that the job has printed. ``follow``: also those to come, until the job ends."""
        return self._queue().logs(self.job, follow=follow)

    def cancel(self) -> None:
        """Ask the job to save and to end."""
        self._queue().cancel(self.job)

    def progress(self) -> Mapping[str, Any]:
        """Return how far the run has come, where its folder is on this machine: ``update``, ``total_updates`` and more."""
        return submission.progress(self.job, self.base)

    def wait(self, *, timeout_s: float | None = None, every_s: float = 5.0) -> QueueState:
        """Wait until the job has ended, or for ``timeout_s`` seconds; return its state then."""
        queue, deadline = self._queue(), None if timeout_s is None else time.monotonic() + timeout_s
        while not (state := queue.state(self.job)).ended and (deadline is None or time.monotonic() < deadline):
            time.sleep(every_s)
        return state

    def result(self) -> TrainResult:
        """Open the folder of the run, also while the job runs.

        Raises:
            UsageError: it is not on this machine, or the job has not begun to train.
        """
        return results.open_run(self.base / self.job.name)

    def _queue(self) -> Queue:
        return submission.queue_of_job(self.job)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitRequest:
    """A request to give a training job to a scheduler."""

    job: TrainRequest
    """The job; ``resume`` names the run that it continues, otherwise ``report.name`` does."""
    name: str | None = None
    """Name of the run that was typed; None: none was."""


def submit(request: SubmitRequest, *, tell: Callable[[str], None] = lambda note: None) -> SubmittedJob:
    """Check a job and hand it to the scheduler; ``tell`` receives the notes on its spec.

    Raises:
        UsageError: the job cannot be planned, or the scheduler refuses it; nothing was submitted.
    """
    loaded = _loaded(request)
    prepared = submission.prepare(loaded)
    for note in loaded.notes:
        tell(note)
    return SubmittedJob(submission.submit(prepared), Path(loaded.spec.report.dir).absolute())


def request_text(request: SubmitRequest) -> str:
    """Return the text of the file that would be handed to the scheduler, as it runs without the files of ``submit``.

    Raises:
        UsageError: the job cannot be planned, or cannot be submitted.
    """
    return submission.prepare(_loaded(request)).standalone


def find(folder: Path, number: str | None) -> SubmittedJob:
    """Find a submitted job by its id or the name of its run; None: the newest one.

    Args:
        folder: the folder of the runs.
        number: the id or name.

    Raises:
        UsageError: there is none.
    """
    return SubmittedJob(submission.find(folder, number), folder)


def job_lines(folder: Path) -> list[str]:
    """Return a line on each job that was submitted with runs in ``folder``."""
    return submission.summary_lines(submission.jobs(folder))


def progress_lines(progress: Mapping[str, Any], *, is_running: bool) -> list[str]:
    """Return ``SubmittedJob.progress`` in words: how far the run has come, its hosts, and the newest copy."""
    from mtrain.jobs.hosts import host_log
    from mtrain.records.wording import copy_words

    if not progress:
        return []
    place = f"run folder {progress['run_dir']}"
    total = progress.get("total_updates")
    lines = [f"update {progress['update']} of {total}, {place}" if total else place]
    if is_running:
        lines += host_log.words(progress["participants"])
    if progress["copied"]:
        lines.append(f"newest copy: {copy_words(progress['copied'])}")
    return lines


def _loaded(request: SubmitRequest) -> "Loaded":
    """Return the spec of the job, with what was chosen for the run that it continues.

    That is the run that ``resume`` names, else the one of ``report.name``. A job starts in the queue with ``--resume if-any``.
    """
    job = request.job.settled()
    config = job.spec.config
    if job.resume == start.AUTO:
        job = replace(job, resume=str(start.resolve_resume(job.read_spec(None), resume=start.AUTO).run))
    if job.resume not in (None, IF_ANY):
        run = submission.resumed_run(str(job.resume))
        if request.name not in (None, run.name):
            raise UsageError(f"--resume {run} and --name {request.name}: name two runs; leave one of them out")
        job = replace(job, resume=str(run))
        place = {"report.name": Given(run.name, f"--name {run.name}"), "report.dir": str(run.parent)}
        return resumed_spec.load(
            lambda values: job.read_spec(values, place), resume=job.resume, config=config, is_queued=True
        )
    loaded = job.read_spec(None)
    if not loaded.spec.report.name or loaded.spec.cluster.options.get("array"):
        return loaded  # a new run, or one for each index
    return resumed_spec.load(job.read_spec, resume=IF_ANY, config=config, is_queued=True)
