"""Compute the perplexity of a split over all ranks, counting every row once."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtrain.core.interfaces import HostBatch


class TokenEvaluator:
    """Implements ``core.interfaces.Evaluator`` for language modelling.

    ``loss``: mean over all labels of the negative logarithm of their probability, in nats. ``perplexity``: e to that power.
    ``accuracy``: share of the labels that are the likeliest token. The score is minus the loss.
    """

    metrics: ClassVar[Sequence[str]] = ("perplexity", "loss", "accuracy", "score")
    headline: ClassVar[Sequence[str]] = ("perplexity", "loss", "accuracy")

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, int, int]] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add (sum of losses, number of labels, number of right ones) of each row of a micro batch."""
        for index, row in zip(batch["index"], predictions, strict=True):
            # Ranks fill up their last batch with rows that others have: each row counts once.
            self._rows.setdefault(int(index), row)

    def partial(self) -> dict[int, tuple[float, int, int]]:
        """Return what was added, by number of the row."""
        return self._rows

    def result(self, partials: Sequence[Mapping[int, tuple[float, int, int]]]) -> dict[str, float]:
        """Return the metrics from the rows of all ranks."""
        union = {index: row for partial in partials for index, row in partial.items()}
        count = sum(row[1] for row in union.values())
        # fsum does not depend on the order, so the number of ranks changes no digit.
        loss = math.fsum(row[0] for row in union.values()) / count
        right = sum(row[2] for row in union.values()) / count
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"score": -loss, "perplexity": perplexity, "loss": loss, "accuracy": right}

    def remarks(self) -> list[str]:
        """Return nothing: the metrics say everything."""
        return []
