"""A job in the queue of a scheduler: found again, asked for its state, and its progress in words."""

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.commands import results
from mtrain.commands.results import TrainResult
from mtrain.core.interfaces.queue import Queue, QueuedJob, QueueState
from mtrain.spec.calls import explain_calls
from mtrain.spec.files import MAX_OWN_BYTES, read_text
from mtrain_clusters import submission


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


@explain_calls
def open_job(number: str | None = None, *, runs: str | os.PathLike[str] = "runs") -> SubmittedJob:
    """Find a job that was submitted, by its id or the name of its run; None: the newest one.

    Raises:
        UsageError: there is none.
    """
    return find(Path(runs).absolute(), number)


def find(folder: Path, number: str | None) -> SubmittedJob:
    """Find a job by its id or the name of its run, as ``open_job``; ``folder`` is that of the runs, and is shown as it is given."""
    return SubmittedJob(submission.find(folder, number), folder)


def progress_lines(progress: Mapping[str, Any], *, is_running: bool) -> list[str]:
    """Return ``SubmittedJob.progress`` in words: how far the run has come, its hosts, and the newest copy."""
    from mtrain.jobs.hosts import host_log
    from mtrain.jobs.watch import hang_log
    from mtrain.records.wording import copy_words

    if not progress:
        return []
    place = f"run folder {progress['run_dir']}"
    total = progress.get("total_updates")
    lines = [f"update {progress['update']} of {total}, {place}" if total else place]
    if is_running:
        lines += host_log.words(progress["participants"])
    lines += hang_log.words(progress["hangs"])
    if progress["copied"]:
        lines.append(f"newest copy: {copy_words(progress['copied'])}")
    return lines
