"""Jobs in the queue of a scheduler, from Python: what ``mtrain submit``, ``status``, ``logs`` and ``cancel`` do."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain import api, results
from mtrain.core.queue import Queue, QueuedJob, QueueState
from mtrain.results import TrainResult

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
        return self.job.request.read_text(encoding="utf-8")

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
        from mtrain.cluster import submission

        return submission.queue_of_job(self.job)


def submit(  # noqa: PLR0913 - what the command takes
    spec: api.SpecSource = None,
    *,
    cluster: str,
    nodes: int | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    script: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
) -> SubmittedJob:
    """Give a job to the queue of a scheduler, and return at once.

    Args:
        spec: see ``mtrain.api``; as ``backend``, ``ranks`` and ``overrides``.
        cluster: replaces ``cluster.name``, for example "slurm".
        nodes: number of hosts to ask for.
        options: the cluster's own options, such as ``{"partition": "gpu", "time": "1:00:00"}``.
        backend: replaces ``backend.name``.
        ranks: number of ranks on each host.
        overrides: further values of the spec.
        script: your own script, which calls ``mtrain.session()``, to run in place of training the spec.
        arguments: arguments of the script.

    Raises:
        UsageError: the job cannot be planned, or the scheduler refuses it; nothing was submitted.
    """
    from mtrain.cluster import submission

    values: dict[str, Any] = {**(overrides or {}), "cluster.name": cluster}
    if nodes is not None:
        values["cluster.nodes"] = nodes
    values |= {f"cluster.options.{key}": value for key, value in (options or {}).items()}
    loaded = _loaded(spec, script, arguments, backend=backend, ranks=ranks, overrides=values)
    job = submission.submit(submission.prepare(loaded))
    return SubmittedJob(job, Path(loaded.spec.report.dir).absolute())


def open_job(number: str | None = None, *, runs: str | os.PathLike[str] = "runs") -> SubmittedJob:
    """Find a job that was submitted, by its id or the name of its run; None: the newest one.

    Raises:
        UsageError: there is none.
    """
    from mtrain.cluster import submission

    return SubmittedJob(submission.find(Path(runs), number), Path(runs).absolute())


def _loaded(
    spec: api.SpecSource, script: str | os.PathLike[str] | None, arguments: Sequence[str], **settings: Any
) -> "Loaded":
    if script is None:
        return api.load_spec(spec, **settings)
    from mtrain.cluster import script_job
    from mtrain.script.settings import PLAIN

    loaded = api.load_spec(PLAIN if spec is None else spec, **settings)
    return script_job.with_script(loaded, Path(script), [os.fspath(word) for word in arguments])
