"""The metrics of an evaluation."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from mtrain.core.interfaces.tensors import HostBatch


class Evaluator(Protocol):
    """Collects the predictions of a whole evaluation set and turns them into metrics.

    A class that has ``scores_once = True`` is asked for ``result`` on the first rank alone, and the other ranks are sent its
    metrics. It is for a ``result`` that takes much time or memory, and calls no collective.
    """

    metrics: ClassVar[Sequence[str]]
    """Names of the metrics that ``result`` returns; a metric of a single class is named ``<metric>/<class>``."""
    headline: ClassVar[Sequence[str]]
    """The few metrics that get a column or a curve, the most informative first."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the predictions of one micro batch; ``batch["index"]`` holds the numbers of its samples."""
        ...

    def partial(self) -> Any:
        """Return everything that this rank has collected, as a picklable value."""
        ...

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics from the ``partial`` of every rank; ``"score"`` is the one to maximise.

        A sample that was evaluated twice counts once.
        """
        ...

    def remarks(self) -> list[str]:
        """Return sentences on the last result that no single metric expresses; the list may be empty."""
        ...
