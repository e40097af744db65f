"""The losses of segmentation models. Needs a bound framework.

Every loss is a mean over pixels or over images, so it does not depend on how images are distributed among ranks.
Shape letters: B batch, S side of the input in pixels, C classes, P pixels of an image, N pixels of all images.
"""

from collections.abc import Sequence

from mtrain.core import ops
from mtrain.core.interfaces import Batch, Collective, Tensor
from mtrain.models.common.segmenter import HardPixels, SegmenterOptions

IGNORED = 255
"""Class index of pixels that count nowhere."""


def losses(
    logits_BCSS: Tensor,
    batch: Batch,
    *,
    options: SegmenterOptions,
    collective: Collective,
    auxiliary_BCSS: Tensor | None = None,
    auxiliary_weight: float = 0.0,
) -> dict[str, Tensor]:
    """Compute the losses that the options ask for; ``total`` alone, or with its parts if there are several.

    Every rank must call equally often.

    Args:
        logits_BCSS: Class logits of each pixel.
        batch: ``pixels`` uint8 (B, S, S, 4), RGB and class.
        options: Options of the model.
        collective: The communication among ranks.
        auxiliary_BCSS: Logits of a head that only training has; None if there is none.
        auxiliary_weight: Factor of its cross entropy.
    """
    rule = options.loss

    def entropy(logits: Tensor) -> Tensor:
        return pixel_loss(
            logits,
            batch,
            label_smoothing=options.label_smoothing,
            collective=collective,
            class_weights=rule.class_weights or (),
            hard=rule.ohem,
        )

    parts = {"cross_entropy": entropy(logits_BCSS)}
    if rule.dice:
        parts["dice"] = rule.dice * dice_loss(logits_BCSS, batch)
    if auxiliary_BCSS is not None:
        parts["auxiliary"] = auxiliary_weight * entropy(auxiliary_BCSS)
    total, *more = parts.values()
    for part in more:
        total = total + part
    return {"total": total, **(parts if more else {})}


def pixel_loss(
    logits_BCSS: Tensor,
    batch: Batch,
    *,
    label_smoothing: float,
    collective: Collective,
    class_weights: Sequence[float] = (),
    hard: HardPixels | None = None,
) -> Tensor:
    """Compute the cross entropy over pixels with a class; every rank must call equally often.

    The sum is divided by the number of such pixels of a rank's micro batch, or their weight, averaged over ranks; it is 0
    where no rank has such a pixel. So the mean over ranks is the mean over the pixels of all of them, however they are
    distributed. With weights it is that of torch's ``cross_entropy``, also with label smoothing: a share that is spread
    over the classes has the weight of the class that it goes to.

    Args:
        logits_BCSS: Class logits of each pixel.
        batch: ``pixels`` uint8 (B, S, S, 4), RGB and class.
        label_smoothing: Share of the target that is spread over all classes.
        collective: The communication among ranks.
        class_weights: Weight of a pixel of each class, of which only the ratios matter; empty: 1 for all.
        hard: Which pixels count, by their difficulty; None: all.
    """
    classes_N, labelled_N = _classes(batch)
    logits_NC = _by_pixel(logits_BCSS)
    counted_N = ops.astype(labelled_N, ops.dtype(logits_BCSS))
    if hard is not None:
        counted_N = counted_N * _hard(logits_NC, classes_N, labelled_N, hard, images=ops.shape(logits_BCSS)[0])
    if class_weights:
        weights_C = _ratios(class_weights, like=logits_NC)
        losses_N = _weigh(logits_NC, classes_N, weights_C, label_smoothing) * counted_N
        counted_N = counted_N * ops.take(weights_C, classes_N)
    else:
        losses_N = ops.cross_entropy(logits_NC, classes_N, label_smoothing=label_smoothing)
        losses_N = losses_N if hard is None else losses_N * counted_N
    weight = collective.all_reduce(ops.sum(counted_N), "mean")
    # Where nothing counts the sum of losses is 0 as well.
    return ops.sum(ops.where(labelled_N, losses_N, 0.0)) / ops.where(weight > 0, weight, 1.0)


def _ratios(class_weights: Sequence[float], *, like: Tensor) -> Tensor:
    """Return the weights divided by the largest one, (C,), so that no size of theirs leaves the range of the type."""
    largest = max(class_weights)
    return ops.constant(tuple(weight / largest for weight in class_weights), like=like, dtype=ops.dtype(like))


def _weigh(logits_NC: Tensor, classes_N: Tensor, weights_C: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross entropy of each pixel with weights of classes, (N)."""
    own_N = ops.cross_entropy(logits_NC, classes_N) * ops.take(weights_C, classes_N)
    if not label_smoothing:
        return own_N
    spread_N = -ops.sum(ops.log_softmax(logits_NC, 1) * weights_C, axis=1) / ops.shape(logits_NC)[1]
    return (1 - label_smoothing) * own_N + label_smoothing * spread_N


def dice_loss(logits_BCSS: Tensor, batch: Batch) -> Tensor:
    """Compute the dice loss of each image and class over pixels with a class, and return the mean.

    It is ``1 - (2 * sum(p * t) + 1) / (sum(p) + sum(t) + 1)`` for probabilities p and targets t: Milletari et al. 2016
    (arXiv 1606.04797), without squares and with the constant 1, so that a class that an image does not have counts too.
    """
    images, count = ops.shape(logits_BCSS)[:2]
    classes_N, labelled_N = _classes(batch)
    dtype = ops.dtype(logits_BCSS)
    known_BP1 = ops.reshape(ops.astype(labelled_N, dtype), (images, -1, 1))
    chances_BPC = ops.reshape(ops.softmax(_by_pixel(logits_BCSS), 1), (images, -1, count)) * known_BP1
    targets_BPC = ops.reshape(ops.one_hot(classes_N, count, dtype=dtype), (images, -1, count)) * known_BP1
    common_BC = ops.sum(chances_BPC * targets_BPC, axis=1)
    both_BC = ops.sum(chances_BPC, axis=1) + ops.sum(targets_BPC, axis=1)
    return ops.mean(1 - (2 * common_BC + 1) / (both_BC + 1))


def _classes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the class of each pixel, int64 (N), 0 where it has none, and whether it has one."""
    classes_N = ops.reshape(ops.astype(batch["pixels"][:, :, :, 3], "int64"), (-1,))
    labelled_N = classes_N != IGNORED
    return ops.where(labelled_N, classes_N, ops.zeros_like(classes_N)), labelled_N


def _by_pixel(logits_BCSS: Tensor) -> Tensor:
    """Return the logits as (N, C)."""
    return ops.reshape(ops.permute_dims(logits_BCSS, (0, 2, 3, 1)), (-1, ops.shape(logits_BCSS)[1]))


def _hard(logits_NC: Tensor, classes_N: Tensor, labelled_N: Tensor, rule: HardPixels, *, images: int) -> Tensor:
    """Return 1 for each pixel that counts as hard and 0 for the others, (N).

    Shrivastava et al. 2016 (arXiv 1604.03540). An image's own pixels are compared, not those of a batch, since a rank
    sees only its part of that.
    """
    chance_N = ops.exp(-ops.cross_entropy(ops.detach(logits_NC), classes_N))
    # Pixels without a class are the easiest of all, so that they take no place among the hardest.
    chance_BP = ops.reshape(ops.where(labelled_N, chance_N, 2.0), (images, -1))
    kept = max(int(rule.min_share * ops.shape(chance_BP)[1]), 1)
    limit_B1 = -ops.topk(-chance_BP, kept)[0][:, -1:]
    return ops.reshape(ops.astype(chance_BP <= ops.clip(limit_B1, rule.threshold), ops.dtype(logits_NC)), (-1,))
