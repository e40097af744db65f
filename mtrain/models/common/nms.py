"""Non-maximum suppression, compiled or in numpy. N is the number of candidates, K the number of boxes that remain."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mtrain.core.compiling import load_function
from mtrain.core.interfaces import Array

_CHUNK = 640
"""Candidates that are compared with the kept boxes of earlier chunks at once."""
_BLOCK = 64
"""Candidates within a chunk that are compared with each other pair by pair."""
_LATER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)
"""Whether the second of two candidates of a block comes after the first."""


def suppress(
    boxes_N4: Array, scores_N: Array, classes_N: Array | None = None, *, iou_threshold: float, max_kept: int
) -> Array:
    """Return the indices (K,) of the boxes that greedy suppression keeps, best score first.

    A box is suppressed if a kept box of its class with a better score overlaps it by more than ``iou_threshold``. Equal
    scores keep their order.

    A compiled loop does it where there is a C compiler, and numpy otherwise; both keep the same boxes. In numpy, boxes are
    processed best first, a chunk at a time, until ``max_kept`` are kept. In each chunk, boxes that a kept box
    of an earlier chunk suppresses are removed first. The others are compared a block at a time: pair by pair within the
    block, then the rest of the chunk with the block's kept boxes. So the cost is (kept x remaining), without a Python
    loop over candidates.

    Args:
        boxes_N4: ``[x1, y1, x2, y2]``.
        scores_N: Scores of the boxes.
        classes_N: Classes of the boxes; None: boxes of different classes suppress each other too.
        iou_threshold: Largest overlap of two kept boxes of a class.
        max_kept: Largest number of boxes to keep.
    """
    order = np.argsort(-scores_N, kind="stable")
    classes = np.zeros(len(order), np.int64) if classes_N is None else np.asarray(classes_N)
    loop = load_greedy()
    if loop is not None:
        all_boxes = _Boxes.of(boxes_N4, classes, order)
        parts = (all_boxes.corners_4N, all_boxes.areas_N, all_boxes.classes_N)
        return np.asarray(order[loop(*parts, iou_threshold, max_kept)])
    return _suppressed_by_numpy(boxes_N4, classes, order, iou_threshold, max_kept)


def _suppressed_by_numpy(boxes_N4: Array, classes: Array, order: Array, iou_threshold: float, max_kept: int) -> Array:
    kept_indices = order[:0]
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        boxes = _Boxes.of(boxes_N4, classes, chunk)
        free = boxes.untouched_by(_Boxes.of(boxes_N4, classes, kept_indices), iou_threshold)
        survivors = _survivors(boxes.at(free), iou_threshold, max_kept - len(kept_indices))
        kept_indices = np.concatenate((kept_indices, chunk[free][survivors]))
        if len(kept_indices) >= max_kept:
            break
    return kept_indices


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes in the layout in which overlaps are computed: corners (4, N), areas (N,) and classes (N,)."""

    corners_4N: Array
    areas_N: Array
    classes_N: Array

    @classmethod
    def of(cls, boxes_N4: Array, classes_N: Array, which: Array) -> "_Boxes":
        corners = np.ascontiguousarray(boxes_N4[which].T, dtype=np.float32)
        areas = (corners[2] - corners[0]) * (corners[3] - corners[1])
        return cls(corners, areas, classes_N[which].astype(np.int32))  # half the bytes to compare for each pair

    def at(self, which: Array | slice) -> "_Boxes":
        return _Boxes(self.corners_4N[:, which], self.areas_N[which], self.classes_N[which])

    def clash_NM(self, others: "_Boxes", threshold: float) -> Array:
        same_class = self.classes_N[:, None] == others.classes_N
        overlapping = _overlapping(self.corners_4N, others.corners_4N, self.areas_N, others.areas_N, threshold)
        return np.asarray(overlapping & same_class)

    def untouched_by(self, others: "_Boxes", threshold: float) -> Array:
        """Return the indices of the boxes that overlap none of ``others`` of their class by more than ``threshold``."""
        return np.flatnonzero(~others.clash_NM(self, threshold).any(axis=0))


def _survivors(boxes: _Boxes, threshold: float, max_kept: int) -> Array:
    """Return the indices of the boxes that suppression keeps, at most ``max_kept``; ``boxes`` are sorted best first."""
    remaining = np.arange(len(boxes.areas_N))
    winners_by_block: list[Array] = [remaining[:0]]
    count = 0
    while remaining.size and count < max_kept:
        head = boxes.at(remaining[:_BLOCK])
        winners = _greedy(head.clash_NM(head, threshold))
        winners_by_block.append(remaining[winners])
        count += winners.size
        remaining = remaining[_BLOCK:]
        remaining = remaining[boxes.at(remaining).untouched_by(head.at(winners), threshold)]
    return np.concatenate(winners_by_block)[:max_kept]


def _overlapping(boxes_4N: Array, others_4M: Array, areas_N: Array, areas_M: Array, threshold: float) -> Array:
    """Return bool (N, M): whether IoU > threshold, computed as ``inter > threshold * union``."""
    width = np.minimum(boxes_4N[2, :, None], others_4M[2])
    width -= np.maximum(boxes_4N[0, :, None], others_4M[0])
    np.maximum(width, 0, out=width)
    height = np.minimum(boxes_4N[3, :, None], others_4M[3])
    height -= np.maximum(boxes_4N[1, :, None], others_4M[1])
    np.maximum(height, 0, out=height)
    width *= height  # the intersection
    union = np.add(areas_N[:, None], areas_M, out=height)
    union -= width
    union *= np.float32(threshold)
    return np.asarray(width > union)


def _greedy(clash_NN: Array) -> Array:
    """Return the indices that remain when each remaining one, in order, suppresses the later ones it clashes with.

    Whether a box remains depends on earlier boxes only. So applying the rule to all boxes at once, starting from all of
    them, settles one more box each time at least; boxes seldom depend on each other in long chains.
    """
    count = len(clash_NN)
    later = (clash_NN & _LATER[:count, :count]).astype(np.float32)  # of the type for which numpy has a fast product
    alive = np.ones(count, bool)
    while True:
        survivors = alive.astype(np.float32) @ later == 0
        if np.array_equal(survivors, alive):
            return np.flatnonzero(alive)
        alive = survivors


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Settings that decide which predictions become detections."""

    confidence: float
    """A detection's score, objectness times class score, must be above this."""
    iou_threshold: float
    """Largest overlap of two detections that could suppress each other."""
    max_detections: int
    """Largest number of detections per image."""
    multi_label: bool
    """Whether a box is a candidate for each class above ``confidence``, instead of its best class only."""
    class_agnostic: bool
    """Whether a box suppresses boxes of other classes, too."""
    max_candidates: int = 30000
    """Number of best candidates that enter suppression, plus those whose score equals the last one's."""


def detections(decoded_NC: Array, selection: Selection) -> Array:
    """Turn one image's predictions into float32 rows (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

    Args:
        decoded_NC: Rows ``[xc, yc, w, h, objectness, class scores...]``, scores in 0..1.
        selection: Thresholds and limits.
    """
    rows = decoded_NC[decoded_NC[:, 4] > selection.confidence].astype(np.float32, copy=False)
    row_indices, classes, scores = _candidates(rows[:, 5:] * rows[:, 4:5], selection)
    half = rows[row_indices, 2:4] / 2
    boxes = np.concatenate((rows[row_indices, :2] - half, rows[row_indices, :2] + half), axis=1)
    groups = None if selection.class_agnostic else classes
    kept_indices = suppress(
        boxes, scores, groups, iou_threshold=selection.iou_threshold, max_kept=selection.max_detections
    )
    columns = (boxes[kept_indices], scores[kept_indices, None], classes[kept_indices, None].astype(np.float32))
    return np.concatenate(columns, axis=1, dtype=np.float32)


def _candidates(scores_NC: Array, selection: Selection) -> tuple[Array, Array, Array]:
    """Return row index, class and score of each candidate."""
    if selection.multi_label and scores_NC.shape[1] > 1:
        row_indices, classes = np.nonzero(scores_NC > selection.confidence)
    else:
        best = scores_NC.argmax(axis=1)
        row_indices = np.flatnonzero(scores_NC[np.arange(len(best)), best] > selection.confidence)
        classes = best[row_indices]
    scores = scores_NC[row_indices, classes]
    if len(scores) > selection.max_candidates:
        lowest_score = np.partition(scores, -selection.max_candidates)[-selection.max_candidates]
        candidates = np.flatnonzero(scores >= lowest_score)
        row_indices, classes, scores = row_indices[candidates], classes[candidates], scores[candidates]
    return row_indices, classes, scores


def detections_by_class(
    boxes_N4: Array,
    scores_NC: Array,
    *,
    confidence: float,
    iou_threshold: float,
    max_candidates: int,
    max_detections: int,
) -> Array:
    """Turn one image's boxes, scored for each class, into rows (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

    Args:
        boxes_N4: ``[x1, y1, x2, y2]``.
        scores_NC: A score for each class.
        confidence: A box is a candidate for each class whose score is above this.
        iou_threshold: A candidate that overlaps a better one of its class by more than this is dropped.
        max_candidates: Number of best candidates of each class that enter suppression, plus those equal to the last
            one.
        max_detections: Largest number of detections, over all classes.

    Returns:
        The rows, float32.
    """
    candidate_NC = scores_NC > confidence
    crowded = np.flatnonzero(np.count_nonzero(candidate_NC, axis=0) > max_candidates)
    if crowded.size:
        lowest_1C = np.partition(scores_NC[:, crowded], -max_candidates, axis=0)[-max_candidates]
        candidate_NC[:, crowded] &= scores_NC[:, crowded] >= lowest_1C
    row_indices, classes = np.nonzero(candidate_NC)
    scores, boxes = scores_NC[row_indices, classes], boxes_N4[row_indices]
    # Boxes of different classes never suppress each other, so processing all classes together, best first, keeps the
    # same boxes as class by class, and can stop at `max_detections`.
    kept_indices = suppress(boxes, scores, classes, iou_threshold=iou_threshold, max_kept=max_detections)
    columns = (boxes[kept_indices], scores[kept_indices, None], classes[kept_indices, None])
    return np.concatenate(columns, axis=1, dtype=np.float32)


SOURCE = Path(__file__).with_name("greedy.c")
Loop = Callable[[Array, Array, Array, float, int], Array]
"""Takes corners (4, N) float32, areas (N,) float32 and classes (N,) int32, best score first, the threshold and the largest number of boxes
to keep; returns the places (K,) of those that remain."""


@cache
def load_greedy() -> Loop | None:
    """Load the loop into this process, after compiling it where that was not done before; None if that cannot be."""
    address, size = ctypes.c_void_p, ctypes.c_long
    types = (address, address, address, size, ctypes.c_float, size, address, address)
    function = load_function(SOURCE, "mtrain_greedy_suppress", *types)
    if function is None:
        return None
    function.restype = size

    def loop(corners_4N: Array, areas_N: Array, classes_N: Array, threshold: float, max_kept: int) -> Array:
        alive, kept = np.ones(len(areas_N), np.uint8), np.empty(min(len(areas_N), max(max_kept, 0)), np.int_)
        addresses = (corners_4N.ctypes.data, areas_N.ctypes.data, classes_N.ctypes.data, len(areas_N))
        count = function(*addresses, threshold, len(kept), alive.ctypes.data, kept.ctypes.data)
        return kept[:count]

    return loop if _works(loop) else None


def _works(loop: Loop) -> bool:
    """Return whether a small example comes out right, so that a miscompiled library is never used."""
    corners = np.array([[0, 1, 1, 20], [0, 1, 1, 20], [10, 11, 11, 30], [10, 11, 11, 30]], np.float32)
    areas, classes = np.full(4, 100, np.float32), np.array([0, 0, 1, 0], np.int32)
    found = [loop(corners, areas, classes, 0.5, 9).tolist(), loop(corners, areas, classes, 0.9, 2).tolist()]
    return found == [[0, 2, 3], [0, 1]]
