"""Non-maximum suppression in numpy. N candidates, K of them kept."""

from dataclasses import dataclass

import numpy as np

from mtrain.core.interfaces import Array

_CHUNK = 1024
_BLOCK = 48


def suppress(
    boxes_N4: Array, scores_N: Array, classes_N: Array | None = None, *, iou_threshold: float, max_kept: int
) -> Array:
    """Indices (K,) of the boxes that greedy suppression keeps, best score first.

    A box falls when a better kept one of its class overlaps it by more than ``iou_threshold``; ``classes_N`` None: of
    any class. Equal scores keep their order. Boxes are taken best first, a chunk at a time, until ``max_kept`` stay:
    those that fall to a kept one of an earlier chunk first, then a block at a time, pair by pair within the block and
    the rest of the chunk against those kept. So the cost is (kept x left) without a loop over candidates.

    Args:
        boxes_N4: ``[x1, y1, x2, y2]``.
    """
    order = np.argsort(-scores_N, kind="stable")
    classes = np.zeros(len(order), np.int64) if classes_N is None else np.asarray(classes_N)
    kept = order[:0]
    for start in range(0, len(order), _CHUNK):
        chunk = order[start : start + _CHUNK]
        boxes = _Boxes.of(boxes_N4, classes, chunk)
        free = boxes.untouched_by(_Boxes.of(boxes_N4, classes, kept), iou_threshold)
        kept = np.concatenate((kept, chunk[free][_survivors(boxes.at(free), iou_threshold, max_kept - len(kept))]))
        if len(kept) >= max_kept:
            break
    return kept


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Corners (4, N), areas (N,) and classes (N,) of some boxes."""

    corners_4N: Array
    areas_N: Array
    classes_N: Array

    @classmethod
    def of(cls, boxes_N4: Array, classes_N: Array, which: Array) -> "_Boxes":
        corners = np.ascontiguousarray(boxes_N4[which].T, dtype=np.float32)
        return cls(corners, (corners[2] - corners[0]) * (corners[3] - corners[1]), classes_N[which])

    def at(self, which: Array | slice) -> "_Boxes":
        return _Boxes(self.corners_4N[:, which], self.areas_N[which], self.classes_N[which])

    def clash_NM(self, others: "_Boxes", threshold: float) -> Array:
        same_class = self.classes_N[:, None] == others.classes_N
        overlapping = _overlapping(self.corners_4N, others.corners_4N, self.areas_N, others.areas_N, threshold)
        return np.asarray(overlapping & same_class)

    def untouched_by(self, others: "_Boxes", threshold: float) -> Array:
        """Indices of the boxes that clash with none of the others."""
        return np.flatnonzero(~others.clash_NM(self, threshold).any(axis=0))


def _survivors(boxes: _Boxes, threshold: float, max_kept: int) -> Array:
    """Indices of those of sorted boxes that stay, ``max_kept`` at most."""
    left = np.arange(len(boxes.areas_N))
    kept: list[Array] = [left[:0]]
    count = 0
    while left.size and count < max_kept:
        head = boxes.at(left[:_BLOCK])
        winners = _greedy(head.clash_NM(head, threshold))
        kept.append(left[winners])
        count += winners.size
        left = left[_BLOCK:]
        left = left[boxes.at(left).untouched_by(head.at(winners), threshold)]
    return np.concatenate(kept)[:max_kept]


def _overlapping(boxes_4N: Array, others_4M: Array, areas_N: Array, areas_M: Array, threshold: float) -> Array:
    """(N, M): IoU > threshold, as ``inter > threshold * union``."""
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
    """Indices that stay when each, in order, strikes out the later ones it clashes with."""
    alive = np.ones(len(clash_NN), bool)
    later = np.triu(clash_NN, 1)
    for i in np.flatnonzero(later.any(axis=1)):
        if alive[i]:
            alive &= ~later[i]
    return np.flatnonzero(alive)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which predictions become detections."""

    confidence: float
    """Lowest score, objectness times class score."""
    iou_threshold: float
    max_detections: int
    """Per picture."""
    multi_label: bool
    """A box is a candidate for each class above ``confidence``, else for its best one."""
    class_agnostic: bool
    """A box suppresses those of other classes, too."""
    max_candidates: int = 30000
    """The best ones, and those equal to the last; the others are dropped before suppression."""


def detections(decoded_NC: Array, selection: Selection) -> Array:
    """One picture's decoded predictions to float32 rows (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

    Args:
        decoded_NC: ``[xc, yc, w, h, objectness, class scores...]``, scores in 0..1.
    """
    rows = decoded_NC[decoded_NC[:, 4] > selection.confidence].astype(np.float32, copy=False)
    which, classes, scores = _candidates(rows[:, 5:] * rows[:, 4:5], selection)
    half = rows[which, 2:4] / 2
    boxes = np.concatenate((rows[which, :2] - half, rows[which, :2] + half), axis=1)
    groups = None if selection.class_agnostic else classes
    kept = suppress(boxes, scores, groups, iou_threshold=selection.iou_threshold, max_kept=selection.max_detections)
    columns = (boxes[kept], scores[kept, None], classes[kept, None].astype(np.float32))
    return np.concatenate(columns, axis=1, dtype=np.float32)


def _candidates(scores_NC: Array, selection: Selection) -> tuple[Array, Array, Array]:
    """Row, class and score of each candidate."""
    if selection.multi_label and scores_NC.shape[1] > 1:
        which, classes = np.nonzero(scores_NC > selection.confidence)
    else:
        best = scores_NC.argmax(axis=1)
        which = np.flatnonzero(scores_NC[np.arange(len(best)), best] > selection.confidence)
        classes = best[which]
    scores = scores_NC[which, classes]
    if len(scores) > selection.max_candidates:
        least = np.partition(scores, -selection.max_candidates)[-selection.max_candidates]
        first = np.flatnonzero(scores >= least)
        which, classes, scores = which[first], classes[first], scores[first]
    return which, classes, scores


def detections_by_class(
    boxes_N4: Array,
    scores_NC: Array,
    *,
    confidence: float,
    iou_threshold: float,
    max_candidates: int,
    max_detections: int,
) -> Array:
    """One picture's boxes with a score for each class to float32 rows (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

    Args:
        boxes_N4: ``[x1, y1, x2, y2]``.
        confidence: a box is a candidate for each class whose score is above it.
        iou_threshold: a candidate that overlaps a better one of its class by more is dropped.
        max_candidates: of each class, the best ones and those equal to the last; the others are dropped before suppression.
        max_detections: of all classes together, the best ones that stay.
    """
    wanted_NC = scores_NC > confidence
    crowded = np.flatnonzero(np.count_nonzero(wanted_NC, axis=0) > max_candidates)
    if crowded.size:
        least_1C = np.partition(scores_NC[:, crowded], -max_candidates, axis=0)[-max_candidates]
        wanted_NC[:, crowded] &= scores_NC[:, crowded] >= least_1C
    which, classes = np.nonzero(wanted_NC)
    scores, boxes = scores_NC[which, classes], boxes_N4[which]
    # Best first over all classes, so it can stop at `max_detections`: the kept ones are those of each class alone.
    kept = suppress(boxes, scores, classes, iou_threshold=iou_threshold, max_kept=max_detections)
    columns = (boxes[kept], scores[kept, None], classes[kept, None])
    return np.concatenate(columns, axis=1, dtype=np.float32)
