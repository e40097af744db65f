"""Pixels as networks take them, and what networks for segmentation predict. Needs a bound framework.

Shape letters: B batch, S side of the input in pixels, C classes.
"""

from collections.abc import Sequence

from mtrain.core import ops
from mtrain.core.interfaces import Tensor


def as_floats(images: Tensor, *, dtype: str) -> Tensor:
    """Return pixels, uint8, in float32, or in float64 if that is the type of the weights.

    A quotient of theirs that was rounded to float32 would part a network in float64 from another one by 6e-8 of its input.
    """
    return ops.astype(images, "float64" if dtype == "float64" else "float32")


def normalise(pixels_BSS3: Tensor, *, mean: Sequence[float], std: Sequence[float], dtype: str) -> Tensor:
    """Return pixels, uint8 (B, S, S, 3), as (B, 3, S, S) of a type.

    Args:
        pixels_BSS3: Red, green and blue.
        mean: Mean of red, green and blue in 0..1, which is subtracted.
        std: Deviation of red, green and blue in 0..1, by which is divided.
        dtype: Type of the network's weights.
    """
    x_BSS3 = as_floats(pixels_BSS3, dtype=dtype) / 255
    mean_3 = ops.constant(tuple(mean), like=x_BSS3, dtype=ops.dtype(x_BSS3))
    std_3 = ops.constant(tuple(std), like=x_BSS3, dtype=ops.dtype(x_BSS3))
    return ops.permute_dims(ops.astype((x_BSS3 - mean_3) / std_3, dtype), (0, 3, 1, 2))


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if they have it."""
    return logits if ops.dtype(logits) == "float64" else ops.astype(logits, "float32")


def predict_classes(logits_BCSS: Tensor) -> dict[str, Tensor]:
    """Return ``classes`` uint8 (B, S, S), the most probable one of each pixel, and ``certainty``, its probability in 255ths."""
    highest_BSS = ops.max(ops.softmax(logits_BCSS, 1), axis=1)
    return {
        "classes": ops.astype(ops.argmax(logits_BCSS, axis=1), "uint8"),
        "certainty": ops.astype(ops.round(highest_BSS * 255), "uint8"),
    }
