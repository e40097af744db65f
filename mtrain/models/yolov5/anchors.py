"""Measure how well anchor sizes fit a data set, and compute new ones by k-means and a genetic search.

Shape letters: N boxes, K anchors. All sizes are (width, height) in pixels.
"""

from typing import Any

import numpy as np

from mtrain.core.interfaces import Array


def fit_NK(boxes_N2: Array, anchors_K2: Array) -> Array:
    """Compare each box with each anchor: the worse ratio of their widths or heights, in (0, 1], 1 for equal sizes."""
    ratio = boxes_N2[:, None] / anchors_K2[None]
    return np.asarray(np.minimum(ratio, 1 / ratio).min(axis=2))


def recall(boxes_N2: Array, anchors_K2: Array, *, threshold: float) -> float:
    """Return the best possible recall: the share of boxes that some anchor matches within a factor ``threshold``."""
    if len(boxes_N2) == 0:
        return 1.0
    return float((fit_NK(boxes_N2, anchors_K2).max(axis=1) > 1 / threshold).mean())


def fitness(boxes_N2: Array, anchors_K2: Array, *, threshold: float) -> float:
    """Return the mean over the boxes of the best anchor's fit, which counts as 0 if no anchor matches."""
    best = fit_NK(boxes_N2, anchors_K2).max(axis=1)
    return float((best * (best > 1 / threshold)).mean())


def k_means(points_N2: Array, count: int, *, rng: np.random.Generator, iterations: int = 30) -> Array:
    """Find ``count`` centres by Lloyd's algorithm, started from k-means++ seeds (Arthur and Vassilvitskii 2007)."""
    centres = points_N2[rng.integers(len(points_N2), size=1)]
    while len(centres) < count:
        distance = ((points_N2[:, None] - centres[None]) ** 2).sum(axis=2).min(axis=1)
        total = distance.sum()
        # All boxes may be equal; then any of them is as good a centre.
        weights = distance / total if total > 0 else None
        centres = np.concatenate((centres, points_N2[rng.choice(len(points_N2), size=1, p=weights)]))
    for _ in range(iterations):
        nearest = ((points_N2[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        moved = np.stack(
            # A centre to which no box is nearest stays where it is.
            [points_N2[nearest == k].mean(axis=0) if (nearest == k).any() else centres[k] for k in range(count)]
        )
        if np.allclose(moved, centres):
            break
        centres = moved
    return centres


def evolve(
    boxes_N2: Array, anchors_K2: Array, *, threshold: float, rng: np.random.Generator, generations: int = 1000
) -> Array:
    """Improve anchors by random changes, which are kept if ``fitness`` rises.

    Each trial changes about nine sides in ten by a normally distributed factor in 0.3..3.
    """
    best, score = anchors_K2, fitness(boxes_N2, anchors_K2, threshold=threshold)
    for _ in range(generations):
        strength = rng.random() * 0.1 * (rng.random(best.shape) < 0.9) * rng.standard_normal(best.shape)
        trial = np.maximum(best * np.clip(1 + strength, 0.3, 3.0), 2.0)
        trial_score = fitness(boxes_N2, trial, threshold=threshold)
        # Only better ones are kept, so the result is never worse than the start.
        if trial_score > score:
            best, score = trial, trial_score
    return best


def compute(boxes_N2: Array, *, levels: int, per_level: int, threshold: float, seed: int, sample: int = 2000) -> Array:
    """Compute new anchors (levels, per_level, 2), small to large.

    Boxes with a side under 2 pixels are ignored. If there are very many boxes, the genetic search uses ``sample`` of
    them and k-means ten times as many.

    Raises:
        ValueError: There are fewer boxes of at least 2 pixels than anchors.
    """
    count = levels * per_level
    boxes = boxes_N2[(boxes_N2 >= 2).all(axis=1)].astype(np.float64)
    if len(boxes) < count:
        raise ValueError(f"{len(boxes)} boxes of at least 2 px, {count} are needed to compute {count} anchors")
    rng = np.random.Generator(np.random.PCG64(seed))
    if len(boxes) > 10 * sample:
        boxes = boxes[rng.choice(len(boxes), size=10 * sample, replace=False)]
    # Widths and heights count alike, however much more one of them varies.
    spread = np.maximum(boxes.std(axis=0), 1e-9)
    centres = np.maximum(k_means(boxes / spread, count, rng=rng) * spread, 2.0)
    few = boxes if len(boxes) <= sample else boxes[rng.choice(len(boxes), size=sample, replace=False)]
    anchors_K2 = evolve(few, centres, threshold=threshold, rng=rng)
    return anchors_K2[np.argsort(anchors_K2.prod(axis=1), kind="stable")].reshape(levels, per_level, 2)


def choose(
    boxes_N2: Array, current: Array, *, threshold: float, always: bool, required: float = 0.98, seed: int = 0
) -> tuple[Array, dict[str, Any]]:
    """Keep the ``current`` anchors (levels, per_level, 2) if they fit the boxes, else compute better ones.

    Args:
        boxes_N2: Sizes of the boxes of the data.
        current: Anchors to keep or to replace.
        threshold: Largest factor between the sides of an anchor and of a box that it matches.
        always: Compute new anchors even if the current ones fit.
        required: The current anchors are kept if the best possible recall is above this.
        seed: Seed of the search.

    Returns:
        The anchors, and a report with ``recall_before``, ``recall_after``, ``changed`` and ``reason``.
    """
    recall_before = recall(boxes_N2, current.reshape(-1, 2), threshold=threshold)
    report = {
        "recall_before": recall_before,
        "recall_after": recall_before,
        "changed": False,
        "reason": "the anchors fit the boxes",
    }
    if recall_before > required and not always:
        return current, report
    try:
        computed = compute(
            boxes_N2, levels=current.shape[0], per_level=current.shape[1], threshold=threshold, seed=seed
        )
    except ValueError as error:
        return current, {**report, "reason": f"kept: {error}"}
    recall_after = recall(boxes_N2, computed.reshape(-1, 2), threshold=threshold)
    if recall_after <= recall_before and not always:
        return current, {**report, "reason": f"kept: recomputed ones reach a recall of {recall_after:.4f} only"}
    return computed, {
        "recall_before": recall_before,
        "recall_after": recall_after,
        "changed": True,
        "reason": "recomputed by k-means",
    }
