"""Choose the size at which decoded images of a split are cached: as small as their use allows.

Sizes are (width, height) in pixels."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import cv2

from mtrain.data.images.geometry import fitted_size

Size = tuple[int, int]
Use: TypeAlias = Literal["layout", "crop", "letterbox", "stretch"]
"""``layout``: parts of training layouts; an image whose longest side exceeds ``side`` is shrunk to it, and smaller ones are enlarged
later, by the map of the augmentation. ``crop``: stretched crops in training; only the decoder reduces images, while their shorter
side keeps ``side`` pixels, so that the smallest crop loses no detail. ``letterbox``: evaluation with a letterbox; the longest side
becomes ``side``. ``stretch``: evaluation of stretched images; both sides become ``side``."""
_KEYS = {"layout": "", "crop": "l", "letterbox": "xf", "stretch": "sf"}
_EXACT_KEYS = {"letterbox": "x", "stretch": "s"}


@dataclass(frozen=True, slots=True)
class Sizing:
    """Maps the size of a file's image to the size at which it is cached."""

    side: int
    use: Use
    exact: bool = False
    """Whether to decode exactly as displays do, instead of as fast as possible; for evaluation alone."""

    @property
    def key(self) -> str:
        """Return a text that separates images of this sizing from others in a cache folder."""
        # Exact and fast decoding give other pixels, so their images must not meet in one cache folder.
        return f"{self.side}{(_EXACT_KEYS if self.exact else _KEYS)[self.use]}"

    def reduction(self, size: Size) -> int:
        """Return 1, 2, 4 or 8: the decoder may return 1 / this of ``size``, rounded up; at least ``side`` pixels are left."""
        pixels = max(size) if self.use in ("layout", "letterbox") else min(size)
        reduce = 1
        # libjpeg decodes at a half, a quarter and an eighth of the size, each for a fraction of the work.
        while not self.exact and reduce < 8 and pixels >= 2 * reduce * self.side:
            reduce *= 2
        return reduce

    def size_for(self, size: Size) -> Size:
        """Return the size to which the image is resized after decoding."""
        if self.use == "stretch":
            return self.side, self.side
        if self.use == "crop":
            reduce = self.reduction(size)
            return -(-size[0] // reduce), -(-size[1] // reduce)
        # Enlarging is left to the map of the augmentation: a larger image in the cache would hold no more detail.
        is_small = self.use == "layout" and max(size) < self.side
        return size if is_small else fitted_size(*size, self.side)

    def method(self, size: Size) -> int:
        """Return OpenCV's interpolation from ``size`` to ``size_for(size)``."""
        if self.use == "stretch":
            return cv2.INTER_CUBIC
        # As in the YOLOv5 documentation, images are shrunk by area averaging and enlarged bilinearly.
        return cv2.INTER_AREA if self.use == "letterbox" and self.side < max(size) else cv2.INTER_LINEAR
