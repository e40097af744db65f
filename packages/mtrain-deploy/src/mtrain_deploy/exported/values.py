"""Check what an exported model computes: shapes of its outputs, and classes of its predictions.

The metadata of a file need not be those of its graph. Without these checks a class that does not exist is an error
somewhere else, or the name of another class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain_deploy.exported.metadata import COUNTS, DETECTIONS, Metadata


def check_outputs(outputs: Mapping[str, Array], metadata: Metadata, *, count: int, name: str) -> None:
    """Check that outputs of ``count`` samples have the declared shapes.

    Raises:
        CheckpointError: One has another.
    """
    for output, declared in metadata.outputs.items():
        value = outputs[output]
        expected = [count if size == "batch" else size for size in declared]
        shape = value.shape if isinstance(value, np.ndarray) else None
        if shape is None or len(shape) != len(expected) or not all(map(_fits, shape, expected)):
            words = ", ".join(map(str, declared))
            raise CheckpointError(
                f"{name}: computes {output} of shape {shape}, its metadata say ({words}); export the model again"
            )
    rows_K7 = outputs.get(DETECTIONS)
    if metadata.form == "nms" and (rows_K7 is None or rows_K7.shape[1:] != (7,)):
        raise CheckpointError(f"{name}: has no output {DETECTIONS} of 7 columns; export the model again")
    if metadata.form == "nms-fixed" and not _are_lists(rows_K7, outputs.get(COUNTS), count=count):
        raise CheckpointError(
            f"{name}: has no output {DETECTIONS} of 6 columns with its {COUNTS}; export the model again"
        )


def _are_lists(rows_BN6: Any, counts_B: Any, *, count: int) -> bool:
    shapes = np.shape(rows_BN6), np.shape(counts_B)
    return (
        len(shapes[0]) == 3 and shapes[0][0::2] == (count, 6) and shapes[1] == (count,) and bool((counts_B >= 0).all())
    )


def _fits(size: int, declared: int | str) -> bool:
    """Return whether a size is the declared one. The exporter writes 0 for one that it does not know."""
    return isinstance(declared, str) or declared in (0, size)


def check_predictions(predictions: Sequence[Any], metadata: Metadata, *, name: str) -> None:
    """Check that predictions are of the classes that the metadata name.

    Raises:
        CheckpointError: They are not.
    """
    known = _KNOWN.get(metadata.kind)
    count = len(metadata.class_names)
    if known is not None and not all(known(prediction, count) for prediction in predictions):
        raise CheckpointError(
            f"{name}: predicts others than the {count} classes that it names, or no numbers; export the model again"
        )


def _are_boxes(rows_K6: Any, classes: int) -> bool:
    if np.ndim(rows_K6) != 2 or np.shape(rows_K6)[1] != 6 or not np.isfinite(rows_K6).all():
        return False
    labels = np.asarray(rows_K6)[:, 5]
    return bool(((labels >= 0) & (labels < classes) & (labels == np.floor(labels))).all())


def _is_mask(prediction: Any, classes: int) -> bool:
    labels = np.asarray(prediction["classes"])
    return labels.ndim == 2 and (not labels.size or (int(labels.min()) >= 0 and int(labels.max()) < classes))


_KNOWN = {
    "detection": _are_boxes,
    "classification": lambda shares_C, classes: np.shape(shares_C) == (classes,),
    "segmentation": _is_mask,
}
"""Whether a prediction has only the first C classes, by task; those of other tasks are not checked."""
