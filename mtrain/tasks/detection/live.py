"""Detection on images in memory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.live import Found
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.drawing import draw_boxes
from mtrain.tasks.detection.evaluator import to_image
from mtrain.tasks.detection.image_cache import resize
from mtrain.tasks.detection.inputs import centre
from mtrain.tasks.detection.section import data_of

if TYPE_CHECKING:
    from mtrain.spec.model import Spec


class LiveDetection:
    """Implements ``core.interfaces.live.LiveImages`` for detection."""

    def __init__(self, spec: "Spec", class_names: Sequence[str], category_ids: Sequence[int]) -> None:
        data = data_of(spec)
        self._side, self._is_stretched = data.image_size, data.resize == "stretch"
        self._sizing = Sizing(self._side, "stretch" if self._is_stretched else "letterbox", exact=True)
        self._class_names, self._category_ids = class_names, category_ids

    def sample(self, image: Array) -> dict[str, Array]:
        """See ``LiveImages.sample``: ``images`` and ``scale_pad``."""
        height, width = image.shape[:2]
        small = resize(image, (width, height), self._sizing)
        if self._is_stretched:
            scale_pad = (self._side / width, self._side / height, 0.0, 0.0)
            return {"images": small, "scale_pad": np.array(scale_pad, np.float32)}
        canvas = np.empty((self._side, self._side, 3), np.uint8)
        pad_w, pad_h = centre(small, canvas)
        ratio_w, ratio_h = small.shape[1] / width, small.shape[0] / height
        return {"images": canvas, "scale_pad": np.array((ratio_w, ratio_h, pad_w, pad_h), np.float32)}

    def found(
        self, prediction: Any, sample: Mapping[str, Array], *, size_wh: tuple[int, int], confidence: float
    ) -> Found:
        """See ``LiveImages.found``: each row also has ``category_id`` and ``bbox``, ``[x, y, width, height]`` in
        pixels of the image."""
        boxes = to_image(prediction, sample["scale_pad"], width=size_wh[0], height=size_wh[1])
        rows = []
        for x1, y1, x2, y2, score, label in boxes[boxes[:, 4] >= confidence].tolist():
            row = {"class": self._class_names[int(label)], "label": int(label), "score": score}
            rows.append(row | {"category_id": self._category_ids[int(label)], "bbox": [x1, y1, x2 - x1, y2 - y1]})
        return Found(sorted(rows, key=lambda row: -row["score"]))

    def drawn(self, image: Array, found: Found, *, confidence: float) -> Array:
        """See ``LiveImages.drawn``."""
        boxes = np.array([row["bbox"] for row in found.rows], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels, scores = ([row[key] for row in found.rows] for key in ("label", "score"))
        return draw_boxes(image, boxes, labels, self._class_names, scores=scores)
