"""The metrics: which share of the known points is found, and how far the points are off."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain_keypoints.people import People


class PointCollector:
    """Keeps the predicted points of each person, in pixels of its image. Implements `Evaluator` without metrics."""

    metrics: ClassVar[Sequence[str]] = ()
    headline: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._points: dict[int, NDArray[np.float64]] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Map the points of one micro batch back to their images. A prediction is (K, 3): x, y and certainty."""
        for index, back, predicted in zip(batch["index"], batch["back"], predictions, strict=True):
            places = predicted[:, :2] @ back[:, :2].T + back[:, 2]
            self._points.setdefault(int(index), np.concatenate([places, predicted[:, 2:]], axis=1))

    def partial(self) -> dict[int, NDArray[np.float64]]:
        """Return the points (K, 3) by number of the sample."""
        return self._points

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Return no metrics: there is no truth."""
        return {}

    def remarks(self) -> list[str]:
        """Return nothing."""
        return []


class PointEvaluator(PointCollector):
    """Scores the points of an evaluation split. Implements `Evaluator` of `mtrain.core.interfaces`."""

    metrics: ClassVar[Sequence[str]] = ("found", "error")
    headline: ClassVar[Sequence[str]] = ("found", "error")

    def __init__(self, split: People, *, near: float) -> None:
        super().__init__()
        self._split, self._near = split, near
        self._shares: dict[str, float] = {}

    def result(self, partials: Sequence[Mapping[int, NDArray[np.float64]]]) -> dict[str, float]:
        """Return `found`, the share of the known points within `evaluate.near`, which is the `score`; `error`, the mean
        distance in longer sides of the box; and `found/<point>`."""
        union = {index: points for partial in partials for index, points in partial.items()}
        order = sorted(union)
        truth, boxes = self._split.points[order], self._split.boxes[order]
        predicted = np.array([union[index] for index in order])
        distance = np.linalg.norm(predicted[..., :2] - truth[..., :2], axis=-1) / boxes[:, 2:].max(axis=1)[:, None]
        known = truth[..., 2] > 0
        near = (distance <= self._near) & known
        self._shares = {
            name: float(near[:, number].sum() / known[:, number].sum())
            for number, name in enumerate(self._split.class_names)
            if known[:, number].any()
        }
        found = float(near.sum() / max(known.sum(), 1))
        error = float(distance[known].mean()) if known.any() else 0.0
        return {"score": found, "found": found, "error": error} | {
            f"found/{name}": share for name, share in self._shares.items()
        }

    def remarks(self) -> list[str]:
        """Name the points that are found least often."""
        missed = {name: share for name, share in self._shares.items() if share < 1}
        worst = sorted(missed, key=lambda name: missed[name])[:3]
        return [f"found least often: {', '.join(f'{name} ({missed[name]:.0%})' for name in worst)}"] if worst else []
