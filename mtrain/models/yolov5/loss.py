"""YOLOv5's targets and loss, computed for all levels at once in shapes that do not depend on values.

Shape letters: B batch, L levels, A anchors of a level, T targets, K blocks (own cell and four neighbours), R = K*A*T
rows of a level in the order (block, anchor, target): candidates, of which the ``valid`` ones are matches; M = L*R; N
anchors in all cells of all levels; C = 5 + classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.core import ops
from mtrain.core.interfaces import Tensor
from mtrain.models.common.boxes import complete_iou_N
from mtrain.models.common.losses import focal_cross_entropy

_OFFSETS = ((0.0, 0.0), (-0.5, 0.0), (0.0, -0.5), (0.5, 0.0), (0.0, 0.5))
"""Shift (x, y) of a target's centre, in cells, that leads to each block: the own cell, then the four neighbours."""
START_BALANCE = (4.0, 1.0, 0.4)
"""Weight of the objectness loss of each level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Settings of the loss; gains are already scaled by image size and class count."""

    class_count: int
    box: float
    obj: float
    cls: float
    """``box``, ``obj`` and ``cls`` are the gains of the three losses."""
    anchor_threshold: float
    """Largest factor between the sides of an anchor and of a target that it matches."""
    cls_pw: float
    obj_pw: float
    """``cls_pw`` and ``obj_pw`` are the weights of positive targets in the two cross entropies."""
    label_smoothing: float
    fl_gamma: float
    """Gamma of the focal loss; 0 is plain cross entropy."""
    autobalance: bool
    """Whether the weights of the levels' objectness losses adapt."""
    gain: float
    """Factor of the summed loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """The cells and anchors that are responsible for targets: candidate rows of all levels."""

    valid_LR: Tensor
    """bool (L, K*A*T): whether the candidate is a match."""
    cell_LR: Tensor
    """int64 (L, K*A*T): index of cell and anchor into a level's (B, H, W, A), flattened."""
    cell_LR2: Tensor
    """int64 (L, K*A*T, 2): x and y of the cell."""
    box_LR4: Tensor
    """(L, K*A*T, 4): target box as dx, dy from the cell's corner, w, h, in grid units."""
    anchor_LR2: Tensor
    """(L, K*A*T, 2): width and height of the anchor in grid units."""
    target_R: Tensor
    """int64 (K*A*T): row of the target."""


def match(targets_T6: Tensor, anchors_LA2: Tensor, sizes: Sequence[tuple[int, ...]], *, threshold: float) -> Matches:
    """Find the cells and anchors that are responsible for each target.

    An anchor matches if both its sides are within a factor ``threshold`` of the target's. It is responsible in the cell
    that contains the target's centre, and in the nearer neighbour cells in x and in y if they are inside the image.

    Args:
        targets_T6: Rows ``[image, class, xc, yc, w, h]``, boxes as shares of the image.
        anchors_LA2: Anchors in grid units.
        sizes: (height, width) of each level in cells.
        threshold: Largest factor between the sides of anchor and target.
    """
    levels, per_level, count = len(sizes), anchors_LA2.shape[1], targets_T6.shape[0]
    blocks, rows = len(_OFFSETS), len(_OFFSETS) * per_level * count
    # Decisions are those of float32 in every precision: else a label at a threshold has other cells in a float64 job.
    near_LAT, sides_LKT, cell_LKT2 = _decisions(
        ops.astype(targets_T6, "float32"), ops.astype(anchors_LA2, "float32"), sizes, threshold=threshold
    )
    valid_LKAT = sides_LKT[:, :, None] & near_LAT[:, None]
    grid_L12 = _grid(sizes, like=targets_T6)
    xy_LT2, wh_LT2 = targets_T6[None, :, 2:4] * grid_L12, targets_T6[None, :, 4:6] * grid_L12
    wh_LKT2 = ops.broadcast_to(wh_LT2[:, None], (levels, blocks, count, 2))
    box_LKT4 = ops.concat((xy_LT2[:, None] - ops.astype(cell_LKT2, ops.dtype(xy_LT2)), wh_LKT2), axis=3)
    index_LKT2 = ops.astype(cell_LKT2, "int64")
    size_L112 = ops.constant(tuple((((w, h),),) for h, w in sizes), like=targets_T6, dtype="int64")
    image_T = ops.astype(targets_T6[:, 0], "int64")
    flat_LKT = (image_T * size_L112[..., 1] + index_LKT2[..., 1]) * size_L112[..., 0] + index_LKT2[..., 0]
    anchor_A = ops.arange(0, per_level, like=image_T)
    cell_LKAT = flat_LKT[:, :, None] * per_level + anchor_A[:, None]

    def spread(x: Tensor, last: int) -> Tensor:
        return ops.reshape(ops.broadcast_to(x, (levels, blocks, per_level, count, last)), (levels, rows, last))

    target_KAT = ops.broadcast_to(ops.arange(0, count, like=image_T), (blocks, per_level, count))
    return Matches(
        valid_LR=ops.reshape(valid_LKAT, (levels, rows)),
        cell_LR=ops.reshape(cell_LKAT, (levels, rows)),
        cell_LR2=spread(index_LKT2[:, :, None], 2),
        box_LR4=spread(box_LKT4[:, :, None], 4),
        anchor_LR2=spread(anchors_LA2[:, None, :, None], 2),
        target_R=ops.reshape(target_KAT, (rows,)),
    )


def _grid(sizes: Sequence[tuple[int, ...]], *, like: Tensor) -> Tensor:
    return ops.constant(tuple(((float(w), float(h)),) for h, w in sizes), like=like)


def _decisions(
    targets_T6: Tensor, anchors_LA2: Tensor, sizes: Sequence[tuple[int, ...]], *, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which anchors match each target (L, A, T), in which blocks (L, K, T), and the cell of each block (L, K, T, 2)."""
    grid_L12 = _grid(sizes, like=targets_T6)
    xy_LT2, wh_LT2 = targets_T6[None, :, 2:4] * grid_L12, targets_T6[None, :, 4:6] * grid_L12
    ratio_LAT2 = wh_LT2[:, None] / anchors_LA2[:, :, None]
    near_LAT = ops.max(ops.maximum(ratio_LAT2, 1 / ratio_LAT2), axis=3) < threshold
    far_LT2 = grid_L12 - xy_LT2
    lower_LT2 = (xy_LT2 % 1 < 0.5) & (xy_LT2 > 1)
    upper_LT2 = (far_LT2 % 1 < 0.5) & (far_LT2 > 1)
    own_LT1 = ops.ones_like(lower_LT2[:, :, :1])
    sides_LKT = ops.permute_dims(ops.concat((own_LT1, lower_LT2, upper_LT2), axis=2), (0, 2, 1))
    offsets_K12 = ops.constant(tuple((offset,) for offset in _OFFSETS), like=targets_T6)
    cell_LKT2 = ops.trunc(xy_LT2[:, None] + offsets_K12[None])
    return near_LAT, sides_LKT, ops.minimum(ops.clip(cell_LKT2, 0), grid_L12[:, None] - 1)


def loss(
    heads: Sequence[Tensor], targets_T6: Tensor, anchors_LA2: Tensor, balance_L: Tensor, settings: LossSettings
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the losses of a micro batch.

    Args:
        heads: Raw predictions of each level, (B, A * C, H, W), float32 or float64.
        targets_T6: Rows ``[image, class, xc, yc, w, h]``, boxes as shares of the image.
        anchors_LA2: Anchors in grid units.
        balance_L: Weight of each level's objectness loss.
        settings: Gains and other settings.

    Returns: A mapping with ``total``, which carries the gradient, and ``box``, ``obj`` and ``cls``, after their gains
        and detached; and the mean objectness loss of each level (L,), detached.
    """
    levels, columns = len(heads), 5 + settings.class_count
    if ops.shape(targets_T6)[0] == 0:
        # Paddle 2.6 refuses tensors without elements. A box of size 0 matches no anchor.
        targets_T6 = ops.zeros((1, 6), like=heads[0])
    targets_T6 = ops.astype(targets_T6, ops.dtype(heads[0]))
    matches = match(
        targets_T6, anchors_LA2, [ops.shape(head)[2:] for head in heads], threshold=settings.anchor_threshold
    )
    # In channels-last memory this is a view.
    flat = [ops.reshape(ops.permute_dims(head, (0, 2, 3, 1)), (-1, columns)) for head in heads]
    rows = [ops.take(flat[i], matches.cell_LR[i]) for i in range(levels)]
    pred_LRC = ops.stack(rows)
    weight_LR = ops.astype(matches.valid_LR, ops.dtype(pred_LRC))
    weight_LR = weight_LR / ops.clip(ops.sum(weight_LR, axis=1, keepdims=True), 1)
    iou_LR = _overlap(pred_LRC, matches)
    box = ops.sum(weight_LR * (1 - iou_LR))
    cls = _class_loss(pred_LRC, targets_T6, matches, weight_LR, settings) if settings.class_count > 1 else 0 * box
    obj_L = _objectness_loss([x_NC[:, 4] for x_NC in flat], ops.detach(iou_LR), matches, settings)
    obj = ops.sum(obj_L * balance_L)
    box, obj, cls = box * settings.box, obj * settings.obj, cls * settings.cls
    parts = {"box": ops.detach(box), "obj": ops.detach(obj), "cls": ops.detach(cls)}
    return {"total": (box + obj + cls) * settings.gain, **parts}, ops.detach(obj_L)


def _overlap(pred_LRC: Tensor, matches: Matches) -> Tensor:
    """Compute the complete IoU of each row's prediction and target (L, R); rows that are no match have no gradient.

    Predictions of such rows are replaced by constants, so that their values stay finite.
    """
    valid_LR1 = matches.valid_LR[:, :, None]
    s_LR4 = ops.sigmoid(ops.where(valid_LR1, pred_LRC[:, :, :4], 0.0))
    pred_LR4 = ops.concat((s_LR4[..., :2] * 2 - 0.5, ops.square(s_LR4[..., 2:] * 2) * matches.anchor_LR2), axis=2)
    neutral_LR4 = ops.concat((matches.anchor_LR2, matches.anchor_LR2), axis=2)
    return complete_iou_N(pred_LR4, ops.where(valid_LR1, matches.box_LR4, neutral_LR4))


def _class_loss(
    pred_LRC: Tensor, targets_T6: Tensor, matches: Matches, weight_LR: Tensor, settings: LossSettings
) -> Tensor:
    smoothing = settings.label_smoothing
    class_T = ops.astype(targets_T6[:, 1], "int64")
    target_TC = ops.one_hot(class_T, settings.class_count, dtype=ops.dtype(pred_LRC)) * (1 - smoothing) + smoothing / 2
    target_LRC = ops.broadcast_to(ops.take(target_TC, matches.target_R)[None], ops.shape(pred_LRC[..., 5:]))
    loss_LRC = focal_cross_entropy(
        pred_LRC[..., 5:], target_LRC, positive_weight=settings.cls_pw, gamma=settings.fl_gamma
    )
    return ops.sum(ops.mean(loss_LRC, axis=2) * weight_LR)


def _objectness_loss(obj: Sequence[Tensor], iou_LR: Tensor, matches: Matches, settings: LossSettings) -> Tensor:
    """Compute the mean objectness loss of each level (L,).

    The target of a cell and anchor is the IoU of the last match, in row order, that refers to it, or 0 without a match.
    """
    sizes = [ops.shape(x)[0] for x in obj]
    rows = ops.shape(iou_LR)[1]
    logits_N = ops.concat(obj)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    start_L1 = ops.constant(tuple((start,) for start in starts), like=matches.cell_LR)
    spare = sum(sizes)  # an extra cell, dropped at the end, receives the rows that are no match
    cell_M = ops.reshape(ops.where(matches.valid_LR, matches.cell_LR + start_L1, spare), (-1,))
    row_M = ops.arange(1, len(sizes) * rows + 1, like=cell_M)
    nothing = ops.zeros((spare + 1,), like=cell_M)
    # Of several rows for one cell, frameworks would write an arbitrary one: the largest row number selects the last.
    last_M = ops.take(ops.put_along_axis(nothing, cell_M, row_M, axis=0, reduce="max"), cell_M)
    cell_M = ops.where(last_M == row_M, cell_M, spare)
    iou_M = ops.reshape(ops.where(cell_M == spare, 0.0, ops.clip(ops.reshape(iou_LR, (-1,)), 0)), (-1,))
    target_N = ops.put_along_axis(ops.zeros((spare + 1,), like=logits_N), cell_M, iou_M, axis=0)[:-1]
    loss_N = focal_cross_entropy(logits_N, target_N, positive_weight=settings.obj_pw, gamma=settings.fl_gamma)
    return ops.stack([ops.mean(part) for part in ops.split(loss_N, sizes)])
