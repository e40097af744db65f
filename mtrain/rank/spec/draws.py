"""Training on samples that are drawn by weights, which follow the evaluations of the job.

The task decides the weights.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mtrain.core.interfaces import HostBatch, Loader, TaskData
from mtrain.core.samples.sampler import Drawn

KEY = "draws"
"""Name of the state in a checkpoint's ``extra``."""


class Draws:
    """The weights of one rank's samples; equal on every rank, because metrics are."""

    def __init__(self, data: TaskData, order: Drawn) -> None:
        self.order = order
        self._data = data
        self._epoch: dict[str, float] = {}
        """Metrics from which the weights of the current epoch were made."""
        self._next: dict[str, float] = {}
        """Metrics of the last evaluation; the next epoch uses them."""

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an evaluation."""
        self._next = dict(metrics)

    def begin(self, *, in_mid_epoch: bool) -> None:
        """Set the weights for the rest of an epoch that begins, or goes on."""
        # They stay the same within an epoch: those of an epoch come from the last evaluation before its first update.
        if not in_mid_epoch:
            self._epoch = self._next
        weights = self._data.sample_weights(self._epoch)
        assert weights is not None, "a task draws by weights always or never"
        self.order.weigh(weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as plain values."""
        # Of both evaluations, so that a job that is resumed in mid-epoch draws the same samples as before.
        return {"epoch": dict(self._epoch), "next": dict(self._next)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the ``state`` of a checkpoint."""
        self._epoch, self._next = dict(state["epoch"]), dict(state["next"])


class DrawingLoader:
    """A loader that sets the weights before each epoch. Implements ``Loader``.

    The loader that it wraps must prepare nothing of an epoch before that epoch is asked for.
    """

    def __init__(self, loader: Loader, draws: Draws) -> None:
        self.updates_per_epoch = loader.updates_per_epoch
        self._loader = loader
        self._draws = draws

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """See ``Loader.micro_batches``."""
        self._draws.begin(in_mid_epoch=start > 0)
        yield from self._loader.micro_batches(epoch, start)

    def close(self) -> None:
        """See ``Loader.close``."""
        self._loader.close()
