"""Choose the size at which decoded images of a split are cached: as small as their use allows.

Sizes are (width, height) in pixels."""

from dataclasses import dataclass, field
from typing import Protocol

import cv2

from mtrain.data.images.geometry import fitted_size

Size = tuple[int, int]


class Sizing(Protocol):
    """Maps the size of a file's image to the size at which it is cached."""

    @property
    def exact(self) -> bool:
        """Return whether to decode exactly as displays do, instead of as fast as possible."""
        ...

    @property
    def key(self) -> str:
        """Return a text that separates images of this sizing from others in a cache folder."""
        ...

    def reduction(self, size: Size) -> int:
        """Return 1, 2, 4 or 8: the decoder may return 1 / this of ``size``, rounded up."""
        ...

    def size_for(self, size: Size) -> Size:
        """Return the size to which the image is resized after decoding."""
        ...

    def method(self, size: Size) -> int:
        """Return OpenCV's interpolation from ``size`` to ``kept``."""
        ...


@dataclass(frozen=True, slots=True)
class AtMost:
    """Sizing for layouts in training: an image whose longest side exceeds ``side`` is shrunk to it. Smaller images
    are enlarged later, by the map of the augmentation."""

    side: int
    exact: bool = field(default=False, init=False)

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}"

    def reduction(self, size: Size) -> int:
        """Return the largest reduction that leaves at least ``side`` pixels."""
        return _reduction(max(size), self.side)

    def size_for(self, size: Size) -> Size:
        """Return the size itself if it is small enough, otherwise the fitted size."""
        # Enlarging is left to the map of the augmentation: a larger image in the cache would hold no more detail.
        return size if max(size) < self.side else fitted_size(*size, self.side)

    def method(self, size: Size) -> int:
        """Use bilinear interpolation."""
        return cv2.INTER_LINEAR


@dataclass(frozen=True, slots=True)
class Fitted:
    """Sizing for evaluation with a letterbox: the longest side becomes ``side``. As in the YOLOv5 documentation,
    images are shrunk by area averaging and enlarged bilinearly."""

    side: int
    exact: bool = True

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        # Exact and fast decoding give other pixels, so their images must not meet in one cache folder.
        return f"{self.side}x" if self.exact else f"{self.side}xf"

    def reduction(self, size: Size) -> int:
        """Decode without reduction if exactly, else with the largest that leaves at least ``side`` pixels."""
        return 1 if self.exact else _reduction(max(size), self.side)

    def size_for(self, size: Size) -> Size:
        """Return the size that fits: see ``geometry.fitted_size``."""
        return fitted_size(*size, self.side)

    def method(self, size: Size) -> int:
        """Use area averaging to shrink and bilinear interpolation to enlarge."""
        return cv2.INTER_AREA if self.side < max(size) else cv2.INTER_LINEAR


@dataclass(frozen=True, slots=True)
class Stretched:
    """Sizing for evaluation of stretched images: both sides become ``side``, bicubic."""

    side: int
    exact: bool = True

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}s" if self.exact else f"{self.side}sf"

    def reduction(self, size: Size) -> int:
        """Decode without reduction if exactly, else with the largest that leaves at least ``side`` pixels each way."""
        return 1 if self.exact else _reduction(min(size), self.side)

    def size_for(self, size: Size) -> Size:
        """Return the square of ``side``."""
        return self.side, self.side

    def method(self, size: Size) -> int:
        """Use bicubic interpolation."""
        return cv2.INTER_CUBIC


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Sizing for stretched crops in training: only the decoder reduces images, while their shorter side keeps
    ``side`` pixels, so that the smallest crop loses no detail."""

    side: int
    exact: bool = field(default=False, init=False)

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}l"

    def reduction(self, size: Size) -> int:
        """Return the reduction by the shorter side."""
        return _reduction(min(size), self.side)

    def size_for(self, size: Size) -> Size:
        """Return the decoded size."""
        reduce = self.reduction(size)
        return -(-size[0] // reduce), -(-size[1] // reduce)

    def method(self, size: Size) -> int:
        """Return bilinear interpolation, which has no effect: the size does not change after decoding."""
        return cv2.INTER_LINEAR


def _reduction(pixels: int, side: int) -> int:
    reduce = 1
    # libjpeg decodes at a half, a quarter and an eighth of the size, each for a fraction of the work.
    while reduce < 8 and pixels >= 2 * reduce * side:
        reduce *= 2
    return reduce
