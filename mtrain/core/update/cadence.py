"""Decide when an evaluation or a checkpoint is due, and advance a job's progress, as pure functions of the progress."""

from dataclasses import dataclass, field, replace

from mtrain.core.interfaces import Progress
from mtrain.errors import CheckpointError
from mtrain.spec.model import CheckpointSpec, EvaluateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """How often something happens: every so many updates, epochs or minutes. None: that measure is not used."""

    every_updates: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None

    def due(self, after: Progress) -> bool:
        """Return whether it is time, by updates or epochs, at the progress ``after`` an update."""
        by_updates = self.every_updates is not None and after.update % self.every_updates == 0
        # Position 0 is also where a job begins, before any epoch has ended.
        epoch_ended = after.position == 0 and after.epoch > 0
        return by_updates or (self.every_epochs is not None and epoch_ended and after.epoch % self.every_epochs == 0)

    def overdue(self, seconds_since: float) -> bool:
        """Return whether ``every_minutes`` have passed.

        Clocks differ between ranks, so the ranks must agree on an answer before they act on it.
        """
        return self.every_minutes is not None and seconds_since >= 60 * self.every_minutes


@dataclass(frozen=True, kw_only=True)
class Cadences:
    """How often a training loop reports, evaluates and saves, and when it gives up."""

    report_every: int = 1
    """Updates per record that is reported."""
    evaluations: Cadence = field(default_factory=Cadence)
    saves: Cadence = field(default_factory=Cadence)
    evaluate_at_end: bool = True
    patience: int | None = None
    """End after this many evaluations without a better score."""
    max_nonfinite: int = 20
    """Updates in a row that may be skipped because their gradient was not finite."""


def evaluations(spec: EvaluateSpec) -> Cadence:
    """Return the cadence of evaluations: none without ``enabled``; ``every_updates`` replaces ``every_epochs``."""
    if not spec.enabled:
        return Cadence()
    if spec.every_updates is not None:
        return Cadence(every_updates=spec.every_updates)
    return Cadence(every_epochs=spec.every_epochs)


def saves(spec: CheckpointSpec) -> Cadence:
    """Return the cadence of checkpoints. One is written as soon as any of the measures requires it."""
    return Cadence(every_updates=spec.every_updates, every_epochs=spec.every_epochs, every_minutes=spec.every_minutes)


def move_on(progress: Progress, *, updates_per_epoch: int | None, samples: int, ended: bool = False) -> Progress:
    """Return ``progress`` after one more update of which is not known yet whether it was skipped; see ``count_update``.

    ``ended``: it was the last one of its epoch, as a stream knows that has no number of ``updates_per_epoch``.
    """
    position = progress.position + 1
    ended = ended or position == updates_per_epoch
    return replace(
        progress,
        update=progress.update + 1,
        epoch=progress.epoch + ended,
        position=0 if ended else position,
        samples=progress.samples + samples,
    )


def count_update(progress: Progress, *, finite: bool) -> Progress:
    """Return ``progress`` once it is known whether the gradient of the oldest update not counted yet was finite."""
    return replace(
        progress,
        skipped=progress.skipped + (not finite),
        skipped_in_a_row=0 if finite else progress.skipped_in_a_row + 1,
    )


def count_score(progress: Progress, score: float) -> Progress:
    """Return ``progress`` after an evaluation, with the best score and the number of evaluations without a better one.

    The score belongs to the epoch that has just been completed, or to the current one in mid-epoch. A second evaluation
    after the same update does not count as one more without gain.
    """
    # At position 0 the progress is in the next epoch already; the score belongs to the one that has ended.
    epoch = progress.epoch - (progress.position == 0 and progress.epoch > 0)
    gain = score > progress.best
    # The evaluation at the end of a job may follow one of the same update.
    again = progress.scored_update == progress.update
    return replace(
        progress,
        best=score if gain else progress.best,
        best_epoch=epoch if gain else progress.best_epoch,
        epochs_without_gain=0 if gain else progress.epochs_without_gain + (not again),
        scored_update=progress.update,
    )


def check_continues(progress: Progress, *, updates_per_epoch: int, global_batch: int) -> None:
    """Refuse to resume if the order of samples would differ from that of the updates taken before.

    Raises:
        CheckpointError: the global batch or the length of the training split has changed.
    """
    # The number of updates tells where a job of these settings would be; any other place is one of other settings.
    expected = Progress(
        update=progress.update,
        epoch=progress.update // updates_per_epoch,
        position=progress.update % updates_per_epoch,
        samples=progress.update * global_batch,
    )
    if (progress.epoch, progress.position, progress.samples) != (expected.epoch, expected.position, expected.samples):
        raise CheckpointError(
            f"--resume: the checkpoint was written after update {progress.update} at epoch {progress.epoch}, position "
            f"{progress.position}, {progress.samples} samples; with train.batch_size {global_batch} and "
            f"{updates_per_epoch} updates per epoch that would be epoch {expected.epoch}, position "
            f"{expected.position}, {expected.samples} samples. Go on with the batch size and the training split it was "
            "trained with, or start a new job from its weights with model.weights: CHECKPOINT"
        )
