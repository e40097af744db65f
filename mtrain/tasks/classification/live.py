"""Classification of images in memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.live import Found
from mtrain.data.images.drawing import grid
from mtrain.tasks.classification.drawing import caption_of
from mtrain.tasks.classification.section import data_of
from mtrain.tasks.classification.source import fit_image

if TYPE_CHECKING:
    from mtrain.spec.model import Spec


class LiveClassification:
    """Implements ``core.interfaces.live.LiveImages`` for classification."""

    def __init__(self, spec: "Spec", class_names: Sequence[str]) -> None:
        self._data = data_of(spec)
        self._class_names = class_names

    def sample(self, image: Array) -> dict[str, Array]:
        """See ``LiveImages.sample``: ``images``."""
        data = self._data
        small = fit_image(image, side=data.image_size, resize=data.resize, crop_share=data.crop_share)
        return {"images": np.ascontiguousarray(small)}

    def found(
        self, prediction: Any, sample: Mapping[str, Array], *, size_wh: tuple[int, int], confidence: float
    ) -> Found:
        """See ``LiveImages.found``: a row for each class whose probability reaches ``confidence``."""
        probabilities_C = np.asarray(prediction, np.float64)
        # Stable, so that of equal probabilities the class of the lower
        # number comes first, as in ``argmax`` of the evaluation.
        order = np.argsort(-probabilities_C, kind="stable")
        order = order[probabilities_C[order] >= confidence]
        return Found(
            [
                {"class": self._class_names[label], "label": label, "score": float(probabilities_C[label])}
                for label in order.tolist()
            ]
        )

    def drawn(self, image: Array, found: Found, *, confidence: float) -> Array:
        """See ``LiveImages.drawn``: the most probable class stands above the image."""
        best = next(iter(found.rows), None)
        caption = caption_of(None if best is None else (best["class"], best["score"]), confidence=confidence)
        return grid([image], columns=1, captions=[caption])
