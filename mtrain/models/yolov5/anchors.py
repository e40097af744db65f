"""Anchor sizes for a data set: how well they fit, and new ones by k-means and a genetic search.

Shape letters: N boxes, K anchors; all in pixels.
"""

from typing import Any

import numpy as np

from mtrain.core.interfaces import Array


def fit_NK(boxes_N2: Array, anchors_K2: Array) -> Array:
    """How far each side of a box is from each anchor's: the worse of the two ratios, in (0, 1], 1 for the same size."""
    ratio = boxes_N2[:, None] / anchors_K2[None]
    return np.asarray(np.minimum(ratio, 1 / ratio).min(axis=2))


def recall(boxes_N2: Array, anchors_K2: Array, *, threshold: float) -> float:
    """Share of the boxes that some anchor matches, sides within a factor ``threshold``: the best possible recall."""
    if len(boxes_N2) == 0:
        return 1.0
    return float((fit_NK(boxes_N2, anchors_K2).max(axis=1) > 1 / threshold).mean())


def fitness(boxes_N2: Array, anchors_K2: Array, *, threshold: float) -> float:
    """Mean over the boxes of the best anchor's fit, 0 where none matches."""
    best = fit_NK(boxes_N2, anchors_K2).max(axis=1)
    return float((best * (best > 1 / threshold)).mean())


def k_means(points_N2: Array, count: int, *, rng: np.random.Generator, iterations: int = 30) -> Array:
    """``count`` centres by Lloyd's algorithm from k-means++ seeds (Arthur and Vassilvitskii 2007)."""
    centres = points_N2[rng.integers(len(points_N2), size=1)]
    while len(centres) < count:
        distance = ((points_N2[:, None] - centres[None]) ** 2).sum(axis=2).min(axis=1)
        total = distance.sum()
        weights = distance / total if total > 0 else None
        centres = np.concatenate((centres, points_N2[rng.choice(len(points_N2), size=1, p=weights)]))
    for _ in range(iterations):
        nearest = ((points_N2[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        moved = np.stack(
            [points_N2[nearest == k].mean(axis=0) if (nearest == k).any() else centres[k] for k in range(count)]
        )
        if np.allclose(moved, centres):
            break
        centres = moved
    return centres


def evolve(
    boxes_N2: Array, anchors_K2: Array, *, threshold: float, rng: np.random.Generator, generations: int = 1000
) -> Array:
    """Anchors changed at random, kept when ``fitness`` rises: nine sides in ten by a normal factor in 0.3..3."""
    best, score = anchors_K2, fitness(boxes_N2, anchors_K2, threshold=threshold)
    for _ in range(generations):
        strength = rng.random() * 0.1 * (rng.random(best.shape) < 0.9) * rng.standard_normal(best.shape)
        trial = np.maximum(best * np.clip(1 + strength, 0.3, 3.0), 2.0)
        trial_score = fitness(boxes_N2, trial, threshold=threshold)
        if trial_score > score:
            best, score = trial, trial_score
    return best


def compute(boxes_N2: Array, *, levels: int, per_level: int, threshold: float, seed: int, sample: int = 2000) -> Array:
    """New anchors (levels, per_level, 2), small to large.

    Boxes under 2 pixels are left out. Of very many boxes ``sample`` guide the genetic search, ten times as many
    k-means.

    Raises:
        ValueError: fewer boxes of 2 pixels and more than anchors.
    """
    count = levels * per_level
    boxes = boxes_N2[(boxes_N2 >= 2).all(axis=1)].astype(np.float64)
    if len(boxes) < count:
        raise ValueError(f"{len(boxes)} boxes of at least 2 px, {count} are needed to compute {count} anchors")
    rng = np.random.Generator(np.random.PCG64(seed))
    if len(boxes) > 10 * sample:
        boxes = boxes[rng.choice(len(boxes), size=10 * sample, replace=False)]
    spread = np.maximum(boxes.std(axis=0), 1e-9)
    centres = np.maximum(k_means(boxes / spread, count, rng=rng) * spread, 2.0)
    few = boxes if len(boxes) <= sample else boxes[rng.choice(len(boxes), size=sample, replace=False)]
    found = evolve(few, centres, threshold=threshold, rng=rng)
    return found[np.argsort(found.prod(axis=1), kind="stable")].reshape(levels, per_level, 2)


def choose(
    boxes_N2: Array, current: Array, *, threshold: float, always: bool, required: float = 0.98, seed: int = 0
) -> tuple[Array, dict[str, Any]]:
    """Keep ``current`` (levels, per_level, 2) where it fits, else compute better ones.

    Args:
        always: compute new ones however well the current ones fit.
        required: best possible recall with which the current ones are kept.

    Returns:
        The anchors, and what was done: ``recall_before``, ``recall_after``, ``changed``, ``reason``.
    """
    before = recall(boxes_N2, current.reshape(-1, 2), threshold=threshold)
    report = {"recall_before": before, "recall_after": before, "changed": False, "reason": "the anchors fit the boxes"}
    if before > required and not always:
        return current, report
    try:
        found = compute(boxes_N2, levels=current.shape[0], per_level=current.shape[1], threshold=threshold, seed=seed)
    except ValueError as error:
        return current, {**report, "reason": f"kept: {error}"}
    after = recall(boxes_N2, found.reshape(-1, 2), threshold=threshold)
    if after <= before and not always:
        return current, {**report, "reason": f"kept: recomputed ones reach a recall of {after:.4f} only"}
    return found, {"recall_before": before, "recall_after": after, "changed": True, "reason": "recomputed by k-means"}
