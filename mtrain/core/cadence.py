"""When something is due: pure functions of where the job stands."""

from dataclasses import dataclass

from mtrain.core.interfaces import Progress
from mtrain.core.spec import CheckpointSpec, EvaluateSpec


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
    """Cadence of evaluation: ``every_updates`` stands in for ``every_epochs``."""
    if spec.every_updates is not None:
        return Cadence(every_updates=spec.every_updates)
    return Cadence(every_epochs=spec.every_epochs)


def saves(spec: CheckpointSpec) -> Cadence:
    """Cadence of checkpoints: whichever measure comes first."""
    return Cadence(every_updates=spec.every_updates, every_epochs=spec.every_epochs, every_minutes=spec.every_minutes)


def advanced(progress: Progress, *, updates_per_epoch: int, samples: int) -> Progress:
    """``progress`` one update on."""
    position = progress.position + 1
    ended = position == updates_per_epoch
    return Progress(
        update=progress.update + 1,
        epoch=progress.epoch + ended,
        position=0 if ended else position,
        best=progress.best,
        best_epoch=progress.best_epoch,
        epochs_without_gain=progress.epochs_without_gain,
        samples=progress.samples + samples,
    )


def scored(progress: Progress, score: float) -> Progress:
    """``progress`` after an evaluation: the best score and how many evaluations passed since.

    The score belongs to the epoch that has just been trained, or is being trained.
    """
    epoch = progress.epoch - (progress.position == 0 and progress.epoch > 0)
    gain = score > progress.best
    return Progress(
        update=progress.update,
        epoch=progress.epoch,
        position=progress.position,
        best=score if gain else progress.best,
        best_epoch=epoch if gain else progress.best_epoch,
        epochs_without_gain=0 if gain else progress.epochs_without_gain + 1,
        samples=progress.samples,
    )
