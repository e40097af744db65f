"""Segmentation of images in memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.live import Found
from mtrain.tasks.segmentation.drawing import overlay
from mtrain.tasks.segmentation.fitting import back, fit_image, lay
from mtrain.tasks.segmentation.section import data_of

if TYPE_CHECKING:
    from mtrain.spec.model import Spec


class LiveSegmentation:
    """Implements ``core.interfaces.live.LiveImages`` for segmentation."""

    def __init__(self, spec: "Spec", class_names: Sequence[str]) -> None:
        self._data = data_of(spec)
        self._class_names = class_names

    def sample(self, image: Array) -> dict[str, Array]:
        """See ``LiveImages.sample``: the colours of ``pixels``, without the classes that training adds."""
        side = self._data.image_size
        pixels = np.empty((side, side, 3), np.uint8)
        size_wh = (image.shape[1], image.shape[0])
        lay(image, fit_image(size_wh, side=side, resize=self._data.resize), pixels)
        return {"pixels": pixels}

    def found(
        self, prediction: Any, sample: Mapping[str, Array], *, size_wh: tuple[int, int], confidence: float
    ) -> Found:
        """See ``LiveImages.found``: each row also has ``share``, of the image's pixels; ``score`` is the mean
        probability of the class at its pixels. The mask has all classes, also those below ``confidence``."""
        classes, certainty = (
            back(np.asarray(prediction[name]), size_wh, resize=self._data.resize) for name in ("classes", "certainty")
        )
        counts = np.bincount(classes.ravel(), minlength=1)
        sums = np.bincount(classes.ravel(), weights=certainty.ravel())
        rows = []
        for label in np.flatnonzero(counts).tolist():
            score = float(sums[label] / counts[label] / 255)
            if score >= confidence:
                share = float(counts[label] / classes.size)
                rows.append({"class": self._class_names[label], "label": label, "score": score, "share": share})
        return Found(sorted(rows, key=lambda row: -row["score"]), mask=classes)

    def drawn(self, image: Array, found: Found, *, confidence: float) -> Array:
        """See ``LiveImages.drawn``: the classes in the colours of Pascal VOC."""
        return image if found.mask is None else overlay(image, found.mask)
