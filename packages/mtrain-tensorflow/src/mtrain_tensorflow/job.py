"""The job of a script that trains with Keras itself: its records, its checkpoints, and the requests that it follows."""

import atexit
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.interfaces import Collective, Progress, State, Why
from mtrain.core.update import cadence
from mtrain.errors import Interrupted, ScriptError
from mtrain.rank.script.job import RankJob, running
from mtrain.rank.script.plain_python import exit_watched, solo_job
from mtrain.rank.script.records import ScriptRecords

if TYPE_CHECKING:
    from mtrain_tensorflow.variables import Variables

KEY = "keras"
"""Where the extra of a checkpoint has what is this module's own."""


@dataclass(frozen=True, kw_only=True)
class KerasRank:
    """The part of a rank's session that records need."""

    collective: Collective
    device: str


class KerasJob:
    """One rank of a job whose script trains by itself; every rank must call the same methods."""

    def __init__(self, collective: Collective, *, device: str) -> None:
        """Join the job of ``mtrain run``; plain Python is a job of one rank.

        Raises:
            ScriptError: several ranks were started by something else.
        """
        job = running().job
        if job is None and collective.size > 1:
            raise ScriptError(
                f"mtrain_tensorflow.keras: {collective.size} ranks that were not started by mtrain run, so they have no run folder; "
                "start the script with: mtrain run --backend horovod --nproc-per-node N SCRIPT"
            )
        self._stack = contextlib.ExitStack()
        self._job: RankJob = self._stack.enter_context(solo_job(None, resumed_on="horovod")) if job is None else job
        self._is_alone = job is None
        self._has_failed = exit_watched() if job is None else bool
        if job is None:
            atexit.register(self._end_alone)
        self._job.take_back()
        self._job.at_end.append(self.end)
        self._collective = collective
        self._saved = None if self._job.resume is None else load_everywhere(self._job.resume, collective)
        self.progress: Progress = Progress() if self._saved is None else self._saved.progress
        rank: Any = KerasRank(collective=collective, device=device)
        self._records = ScriptRecords(self._job, self._job.resolved.backend, rank, self._saved)
        self._saves = cadence.saves(self._job.spec.checkpoint)
        self._variables: Variables | None = None
        self._total: int | None = None
        self._updates_per_epoch: int | None = None
        self._place: Mapping[str, Any] = {}
        self._saved_at = self._updated_at = time.monotonic()
        self._last_saved = -1 if self._saved is None else self._saved.progress.update
        self._is_over = False

    def begin(self, variables: "Variables", *, total: int | None, updates_per_epoch: int | None) -> Mapping[str, Any]:
        """Restore the checkpoint that is resumed, and announce the training.

        Returns what ``updated`` was given as ``place`` last before the checkpoint; empty at the start.
        """
        if self._variables is not None:
            raise ScriptError("mtrain_tensorflow.keras: used twice; a script has one training with it")
        self._variables, self._total, self._updates_per_epoch = variables, total, updates_per_epoch
        if self._saved is not None:
            own = self._saved.meta["extra"].get(KEY)
            if own is None:
                raise ScriptError(
                    f"{self._job.resume}: was not written by mtrain_tensorflow.keras; resume it with the script that wrote it"
                )
            variables.restore(self._saved.state)
            states = own["random"]
            variables.restore_random_state(states[self._collective.rank % len(states)])
            self._place = own["place"]
            self._records.choices = _other_numbers(variables.without_state())
        fields = {
            "total_updates": total or 0,
            "updates_per_epoch": updates_per_epoch,
            "precision": variables.precision(),
            "model": "Keras",
            "train_samples": None,
        }
        self._records.announce(self._job.spec, fields)
        self._updated_at = time.monotonic()
        return self._place

    def report_update(
        self, losses: Mapping[str, float], *, position: int, ended: bool, place: Mapping[str, Any]
    ) -> None:
        """Record an update, save where that is due, and end the job where somebody has asked for it.

        ``position``: batches of the epoch that are done. ``ended``: it was the last one. ``place``: what ``begin`` is to return
        after a resume.

        Raises:
            Interrupted: the job was asked to end; its state is saved.
        """
        before = self.progress
        overdue = self._saves.overdue(time.monotonic() - self._saved_at)
        flags = np.array([*losses.values(), self._job.stop(), self._job.save_requested(), overdue], dtype=np.float64)
        # One exchange for the losses and for all that the ranks must decide together.
        *means, stop, asked, late = self._collective.all_reduce(flags, "mean")
        self.progress = replace(
            before,
            update=before.update + 1,
            epoch=before.epoch + ended,
            position=0 if ended else position,
        )
        self._place = place
        self._report(before, dict(zip(losses, map(float, means), strict=True)))
        if stop > 0:
            self._save("ending")
            self._leave(Interrupted(f"ended after update {self.progress.update}, as was asked for; the state is saved"))
        if asked > 0:
            self._job.save_requested.mark_served()
        if asked > 0 or late > 0 or self._saves.due(self.progress) or self.progress.update == self._total:
            self._save("requested" if asked > 0 else "due")

    def _leave(self, error: Interrupted) -> NoReturn:
        """Leave the script after the state is saved."""
        if self._is_alone:
            self.end("interrupted")
            self._stack.__exit__(type(error), error, None)
        raise error

    def _report(self, before: Progress, losses: Mapping[str, float]) -> None:
        now = time.monotonic()
        seconds, self._updated_at = now - self._updated_at, now
        if before.update % self._job.spec.report.every_updates:
            return
        assert self._variables is not None
        self._records.report.update(
            {
                "update": before.update,
                "epoch": before.epoch,
                "position": before.position,
                "updates_per_epoch": self._updates_per_epoch,
                "total_updates": self._total,
                "losses": dict(losses),
                "learning_rate": self._variables.learning_rate(),
                "update_seconds": seconds,
            }
        )

    def end_epoch(self) -> None:
        """Note that the epoch had no further update, where its length was not known before."""
        if self.progress.position:
            self.progress = replace(self.progress, epoch=self.progress.epoch + 1, position=0)

    def save_last(self) -> None:
        """Write the last checkpoint where it was not written yet; there is no further update."""
        if self._last_saved != self.progress.update:
            self._save("due")

    def report_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation, as means over the ranks."""
        means = self._collective.all_reduce(np.array(list(metrics.values()), dtype=np.float64), "mean")
        named = dict(zip(metrics, map(float, means), strict=True))
        self._records.report_evaluation(
            named, update=self.progress.update, epoch=self.progress.epoch, score=None, seconds=0.0
        )

    def _save(self, why: Why) -> None:
        """Write a checkpoint; every rank gives the state of its random numbers."""
        assert self._variables is not None
        self._saved_at, self._last_saved = time.monotonic(), self.progress.update
        own = {"place": dict(self._place), "random": self._collective.all_gather(self._variables.random_state())}
        # Horovod's ranks hold the same state, so rank 0 copies it alone.
        state = self._variables.copies(updates=self.progress.update) if self._collective.rank == 0 else State()
        self._records.further = {KEY: own}
        self._records.save(state, self.progress, score=None, why=why, spec=self._job.spec, stream=None)

    def end(self, reason: Literal["done", "interrupted", "failed"]) -> None:
        """Write the last checkpoint, unless the script has failed, and the summary; can be called twice."""
        if self._is_over:
            return
        self._is_over = True
        if self._variables is not None and reason == "done":
            self.save_last()
        self._records.end(
            reason, self.progress, spec=self._job.spec, total_updates=self._total, stepped=None, measured=None
        )

    def _end_alone(self) -> None:
        """End the job of plain Python."""
        self.end("failed" if self._has_failed() else "done")
        self._stack.close()


def _other_numbers(layers: Sequence[str]) -> Sequence[tuple[str, str]]:
    """Return the warning of a resumed job with layers whose random numbers cannot be saved."""
    if not layers:
        return ()
    sentence = (
        f"{', '.join(layers[:3])}: draws other random numbers from here on than a job that was not interrupted, because TensorFlow keeps "
        "the counters of random operations to itself; for an exact resume of later runs call "
        "tf.keras.backend.experimental.enable_tf_random_generator() before the model is made"
    )
    return [("warning", sentence)]


def rest(of: Iterator[Any], done: int) -> Iterator[Any]:
    """Return an iterator without its first ``done`` elements, which are drawn and dropped."""
    for _ in range(done):
        next(of, None)
    return of
