"""At which size a split's pictures are kept once decoded: as small as their use allows.

Sizes are (width, height) in pixels."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import cv2

from mtrain.data.images.geometry import fitted_size

Size = tuple[int, int]


class Sizing(Protocol):
    """From the size of a file's picture to the size it is kept at."""

    exact: ClassVar[bool]
    """Decode as displays do, not as fast as can be."""

    @property
    def key(self) -> str:
        """Tells pictures of this sizing from others in a cache folder."""
        ...

    def reduction(self, size: Size) -> int:
        """1, 2, 4 or 8: the decoder may give 1 / this of ``size``, rounded up."""
        ...

    def kept(self, size: Size) -> Size:
        """What the picture is resized to after decoding."""
        ...

    def method(self, size: Size) -> int:
        """OpenCV's interpolation from ``size`` to ``kept``."""
        ...


@dataclass(frozen=True, slots=True)
class AtMost:
    """For layouts in training: a picture whose longest side is above ``side`` is shrunk to it; the map of the
    augmentation enlarges smaller ones."""

    side: int
    exact: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}"

    def reduction(self, size: Size) -> int:
        """Where the decoder's result still has ``side`` pixels."""
        return _reduction(max(size), self.side)

    def kept(self, size: Size) -> Size:
        """The size itself where it is small enough."""
        return size if max(size) < self.side else fitted_size(*size, self.side)

    def method(self, size: Size) -> int:
        """Bilinear."""
        return cv2.INTER_LINEAR


@dataclass(frozen=True, slots=True)
class Fitted:
    """For evaluation with a letterbox: the longest side becomes ``side``, as the YOLOv5 documentation says by area
    when shrinking, bilinear when enlarging."""

    side: int
    exact: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}x"

    def reduction(self, size: Size) -> int:
        """None."""
        return 1

    def kept(self, size: Size) -> Size:
        """See ``geometry.fitted_size``."""
        return fitted_size(*size, self.side)

    def method(self, size: Size) -> int:
        """Area or bilinear."""
        return cv2.INTER_AREA if self.side < max(size) else cv2.INTER_LINEAR


@dataclass(frozen=True, slots=True)
class Stretched:
    """For evaluation of stretched pictures: both sides become ``side``, bicubic."""

    side: int
    exact: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}s"

    def reduction(self, size: Size) -> int:
        """None."""
        return 1

    def kept(self, size: Size) -> Size:
        """The square."""
        return self.side, self.side

    def method(self, size: Size) -> int:
        """Bicubic."""
        return cv2.INTER_CUBIC


@dataclass(frozen=True, slots=True)
class AtLeast:
    """For stretched crops in training: pictures are reduced by the decoder alone, while their shorter side keeps
    ``side`` pixels, so that the smallest crop loses nothing."""

    side: int
    exact: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """See ``Sizing.key``."""
        return f"{self.side}l"

    def reduction(self, size: Size) -> int:
        """By the shorter side."""
        return _reduction(min(size), self.side)

    def kept(self, size: Size) -> Size:
        """As decoded."""
        reduce = self.reduction(size)
        return -(-size[0] // reduce), -(-size[1] // reduce)

    def method(self, size: Size) -> int:
        """Bilinear; nothing is left to do."""
        return cv2.INTER_LINEAR


def _reduction(pixels: int, side: int) -> int:
    reduce = 1
    while reduce < 8 and pixels >= 2 * reduce * side:
        reduce *= 2
    return reduce
