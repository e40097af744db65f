"""When something is due: pure functions of where the job stands."""

from dataclasses import dataclass, replace

from mtrain.core.interfaces import Progress
from mtrain.errors import CheckpointError
from mtrain.spec.model import CheckpointSpec, EvaluateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence:
    """Every so many updates, epochs or minutes; None: not by that measure."""

    every_updates: int | None = None
    every_epochs: int | None = None
    every_minutes: float | None = None

    def due(self, after: Progress) -> bool:
        """Whether ``after``, the progress behind an update, is a multiple of updates or epochs."""
        by_updates = self.every_updates is not None and after.update % self.every_updates == 0
        epoch_ended = after.position == 0 and after.epoch > 0
        return by_updates or (self.every_epochs is not None and epoch_ended and after.epoch % self.every_epochs == 0)

    def overdue(self, seconds_since: float) -> bool:
        """Whether the minutes are over. Clocks differ between ranks: they must agree before they act on it."""
        return self.every_minutes is not None and seconds_since >= 60 * self.every_minutes


def evaluations(spec: EvaluateSpec) -> Cadence:
    """Cadence of evaluation: ``every_updates`` stands in for ``every_epochs``; never where it is not enabled."""
    if not spec.enabled:
        return Cadence()
    if spec.every_updates is not None:
        return Cadence(every_updates=spec.every_updates)
    return Cadence(every_epochs=spec.every_epochs)


def saves(spec: CheckpointSpec) -> Cadence:
    """Cadence of checkpoints: whichever measure comes first."""
    return Cadence(every_updates=spec.every_updates, every_epochs=spec.every_epochs, every_minutes=spec.every_minutes)


def advanced(progress: Progress, *, updates_per_epoch: int, samples: int, finite: bool = True) -> Progress:
    """``progress`` one update on; ``finite``: whether its gradient was, else it was skipped."""
    position = progress.position + 1
    ended = position == updates_per_epoch
    return replace(
        progress,
        update=progress.update + 1,
        epoch=progress.epoch + ended,
        position=0 if ended else position,
        samples=progress.samples + samples,
        skipped=progress.skipped + (not finite),
        skipped_in_a_row=0 if finite else progress.skipped_in_a_row + 1,
    )


def scored(progress: Progress, score: float) -> Progress:
    """``progress`` after an evaluation: the best score and how many evaluations passed since.

    The score belongs to the epoch that has just been trained, or is being trained. Evaluated again behind the same
    update, a job has not gone longer without gain.
    """
    epoch = progress.epoch - (progress.position == 0 and progress.epoch > 0)
    gain = score > progress.best
    again = progress.scored_update == progress.update
    return replace(
        progress,
        best=score if gain else progress.best,
        best_epoch=epoch if gain else progress.best_epoch,
        epochs_without_gain=0 if gain else progress.epochs_without_gain + (not again),
        scored_update=progress.update,
    )


def check_continues(progress: Progress, *, updates_per_epoch: int, global_batch: int) -> None:
    """Refuse to go on where the order of samples is another one than that of the updates taken.

    Raises:
        CheckpointError: the global batch or the length of the training split is not what it was.
    """
    expected = Progress(
        update=progress.update,
        epoch=progress.update // updates_per_epoch,
        position=progress.update % updates_per_epoch,
        samples=progress.update * global_batch,
    )
    if (progress.epoch, progress.position, progress.samples) != (expected.epoch, expected.position, expected.samples):
        raise CheckpointError(
            f"--resume: the checkpoint stands behind update {progress.update} at epoch {progress.epoch}, position "
            f"{progress.position}, {progress.samples} samples; with train.batch_size {global_batch} and "
            f"{updates_per_epoch} updates per epoch that would be epoch {expected.epoch}, position {expected.position}, "
            f"{expected.samples} samples. Go on with the batch size and the training split it was trained with, or "
            "start a new job from its weights with model.weights: CHECKPOINT"
        )
