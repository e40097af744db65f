"""The losses by which a network imitates a trained one. Import it only where a framework is bound.

All of them are means over samples of a value of each sample, so they do not depend on how samples are distributed over
ranks and micro batches. Shape letters: B batch, C classes, A predictions of a cell, M cells of all levels, H height, W width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Imitation, Tensor
from mtrain.models.common.boxes import generalised_iou_N

CONFIDENT = 0.1
"""Lowest score of a teacher's prediction whose box is imitated."""
_SURE = 1e-6
"""Distance of a probability from 0 and 1 at which its logarithm is limited."""
_SHARPNESS = 2
"""Exponent of the difference that weights a cell's cross entropy: beta of Li et al. 2020, Generalized Focal Loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detections:
    """Predictions for each cell of an image; cells are ordered from the finest level to the coarsest, by rows."""

    scores_BAMC: Tensor
    """Probability of each class, in 0..1."""
    boxes_BAM4: Tensor
    """``[x1, y1, x2, y2]`` in pixels of the input."""

    def best(self) -> "Detections":
        """Return the prediction of each cell that has the highest score, A = 1."""
        if ops.shape(self.scores_BAMC)[1] == 1:
            return self
        highest_BAM = ops.max(ops.detach(self.scores_BAMC), axis=3)
        index_B1M1 = ops.expand_dims(ops.argmax(highest_BAM, axis=1, keepdims=True), 3)
        return Detections(
            scores_BAMC=ops.take_along_axis(self.scores_BAMC, index_B1M1, 1),
            boxes_BAM4=ops.take_along_axis(self.boxes_BAM4, index_B1M1, 1),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """The values of one forward pass that can be imitated. Either ``logits`` or ``detections`` is there."""

    logits: Tensor | None = None
    """Class logits (B, C) or (B, C, H, W)."""
    detections: Detections | None = None
    maps: Sequence[Tensor] = ()
    """Feature maps (B, channels, H, W), fine to coarse."""


class Imitator(nn.Module):
    """Base class of networks that others can imitate, and that can imitate others."""

    imitation: Imitation | None = None
    decided: list[Tensor] | None = None
    """Where it is a list, a network whose predictions decide with which objects they are compared appends what was decided, (B, ...)."""

    def signals(self, batch: Batch) -> Signals:
        """Show what can be imitated for the images of a micro batch. A subclass computes it."""
        raise NotImplementedError

    def taught(
        self, losses: Mapping[str, Tensor], batch: Batch, signals: Callable[[], Signals], *, scale: float = 1.0
    ) -> dict[str, Tensor]:
        """Return ``losses`` with the imitation of the teacher in ``total`` and, detached, as ``distil``.

        Args:
            losses: The losses on the data's own labels.
            batch: The micro batch.
            signals: Makes this network's own signals; called only if there is a teacher.
            scale: Factor by which the model multiplies the mean over samples in its ``total``.
        """
        if self.imitation is None:
            return dict(losses)
        with nn.no_grad():
            teacher = self.imitation.seen(batch)
        loss = imitation_loss(signals(), teacher, self.imitation)
        total = self.imitation.labels * losses["total"] + scale * ops.astype(loss, ops.dtype(losses["total"]))
        return {**losses, "total": total, "distil": ops.detach(loss)}


def imitation_loss(student: Signals, teacher: Signals, imitation: Imitation) -> Tensor:
    """Compute the loss between the signals of two networks for the same micro batch, with the gains of ``imitation``."""
    parts = []
    if imitation.outputs > 0 and student.logits is not None and teacher.logits is not None:
        parts.append(imitation.outputs * class_loss(student.logits, teacher.logits, imitation.temperature))
    if imitation.outputs > 0 and student.detections is not None and teacher.detections is not None:
        parts.append(imitation.outputs * detection_loss(student.detections, teacher.detections))
    if imitation.features > 0:
        parts.append(imitation.features * attention_loss(student.maps, teacher.maps))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def class_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Compute the divergence of the class probabilities from the teacher's, times the temperature squared.

    Hinton et al. 2015 (arXiv 1503.02531), section 2: both logits are divided by the temperature, and the factor keeps the size
    of the gradient. The result is the mean over samples and, of maps of logits, over pixels.
    """
    mine = ops.log_softmax(logits / temperature, 1)
    theirs = ops.log_softmax(ops.astype(teacher_logits, ops.dtype(logits)) / temperature, 1)
    return temperature**2 * ops.mean(ops.sum(ops.exp(theirs) * (theirs - mine), axis=1))


def detection_loss(mine: Detections, theirs: Detections) -> Tensor:
    """Compute the difference of scores and boxes of each cell, as the mean over samples.

    Scores: the cross entropy against the teacher's scores, weighted by the squared difference (Li et al. 2020, Generalized
    Focal Loss, equation 3). Boxes: 1 - generalised IoU, weighted by the teacher's score where that is at least
    ``CONFIDENT`` (the teacher's confidence as weight: Mehta and Ozturk 2018, arXiv 1805.06361). The sums of a sample are
    divided by the sum of its weights, at least 1. If one network predicts more boxes of a cell than the other, the best
    of each cell are compared.
    """
    if ops.shape(mine.scores_BAMC)[1] != ops.shape(theirs.scores_BAMC)[1]:
        mine, theirs = mine.best(), theirs.best()
    target_BAMC = ops.astype(theirs.scores_BAMC, ops.dtype(mine.scores_BAMC))
    highest_BAM = ops.max(target_BAMC, axis=3)
    weight_BAM = ops.where(highest_BAM >= CONFIDENT, highest_BAM, 0.0)
    weights_B = ops.clip(ops.sum(weight_BAM, axis=(1, 2)), 1.0)
    sure_BAMC = ops.clip(mine.scores_BAMC, _SURE, 1 - _SURE)
    entropy_BAMC = -(target_BAMC * ops.log(sure_BAMC) + (1 - target_BAMC) * ops.log(1 - sure_BAMC))
    focus_BAMC = ops.pow(ops.abs(target_BAMC - mine.scores_BAMC), _SHARPNESS)
    boxes_BAM4 = ops.astype(theirs.boxes_BAM4, ops.dtype(mine.boxes_BAM4))
    apart_BAM = 1 - generalised_iou_N(mine.boxes_BAM4, boxes_BAM4, eps=1e-9)
    scores_B = ops.sum(focus_BAMC * entropy_BAMC, axis=(1, 2, 3))
    return ops.mean((scores_B + ops.sum(weight_BAM * apart_BAM, axis=(1, 2))) / weights_B)


def attention_loss(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """Compute the squared distance of normalised attention maps, summed over levels, as the mean over samples.

    The attention of a feature map is the sum of its squares over channels: Zagoruyko and Komodakis 2017 (arXiv 1612.03928),
    section 3.1, so both networks may have any number of channels. A map of another size is resized.
    """
    distances = []
    for my_BCHW, their_BCHW in zip(mine, theirs, strict=True):
        size = ops.shape(my_BCHW)[2:]
        wanted_B1HW = _attention(ops.astype(their_BCHW, ops.dtype(my_BCHW)))
        if ops.shape(wanted_B1HW)[2:] != size:
            wanted_B1HW = ops.resize_bilinear(wanted_B1HW, size)
        distances.append(ops.sum(ops.square(_unit(_attention(my_BCHW)) - _unit(wanted_B1HW)), axis=(1, 2, 3)))
    return ops.mean(ops.sum(ops.stack(distances), axis=0))


def _attention(x_BCHW: Tensor) -> Tensor:
    return ops.sum(ops.square(x_BCHW), axis=1, keepdims=True)


def _unit(x_B1HW: Tensor) -> Tensor:
    """Divide the map of each sample by its Euclidean norm."""
    return x_B1HW / ops.sqrt(ops.sum(ops.square(x_B1HW), axis=(1, 2, 3), keepdims=True) + 1e-12)
