"""Create segmentation samples for the loader, each a pure function of (seed, epoch, index)."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array
from mtrain.data.images.colour import random_gains, scale_hsv
from mtrain.data.images.indexed import IGNORED
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.tasks.segmentation.fitting import FittedPlace, Resize, fit_image, fitted_size, lay, lay_mask
from mtrain.tasks.segmentation.masks import MaskedImages
from mtrain.tasks.segmentation.section import SegmentationAugmentSpec


@dataclass(frozen=True, slots=True, eq=False)
class MaskItem:
    """One sample in the form that goes into a batch."""

    index: int
    pixels: NDArray[np.uint8] | None = None
    """(S, S, 4): RGB and the class; None if it lies in shared memory."""


class SegmentationSource:
    """One split as samples, augmented if ``augment`` is set. Implements ``mtrain.data.loader.source_ring.PooledSource``.

    A sample is one array, ``pixels`` uint8 (S, S, 4): RGB, and the class of each pixel as the fourth channel, so that both
    travel through shared memory. Without ``augment`` the fourth channel is 255 everywhere: evaluation compares with the
    masks themselves.
    """

    def __init__(
        self,
        split: MaskedImages,
        *,
        side: int,
        resize: Resize = "letterbox",
        augment: SegmentationAugmentSpec | None = None,
        seed: int = 0,
    ) -> None:
        self._split = split
        self._side, self._resize = side, resize
        self._augment = augment
        self._seed = seed
        self.array = ArraySpec("pixels", (side, side, 4))

    def __len__(self) -> int:
        return len(self._split)

    def describe(self, index: int) -> str:
        """Return the sample's image file, for error messages."""
        return str(self._split.images[index])

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        """Return the shape (S, S, 4), which is always the same."""
        return self.array.shape

    def sample(self, epoch: int, index: int, *, update: int = 0) -> MaskItem:
        """Return one sample with its pixels; augmentation depends on (seed, epoch, index)."""
        pixels = np.empty(self.array.shape, dtype=np.uint8)
        return MaskItem(self.fill(epoch, index, pixels, update=update).index, pixels)

    def fill(self, epoch: int, index: int, out: Array, *, update: int = 0) -> MaskItem:
        """Prepare a sample like ``sample``, with the pixels written to ``out`` (S, S, 4) uint8.

        Raises:
            DataError: the image or its mask cannot be used.
        """
        image = self._split.image(index)
        size_wh = (image.shape[1], image.shape[0])
        colours, classes = np.empty((self._side, self._side, 3), np.uint8), np.empty((self._side,) * 2, np.uint8)
        if self._augment is None:
            lay(image, fit_image(size_wh, side=self._side, resize=self._resize), colours)
            classes[...] = IGNORED
        else:
            rng = np.random.Generator(np.random.PCG64([self._seed, epoch, index]))
            place = self._random_place(rng, size_wh, self._augment)
            lay(image, place, colours)
            lay_mask(self._split.mask(index, size_wh), place, classes, fill=IGNORED)
            colours, classes = _vary(rng, self._augment, colours, classes)
        out[..., :3], out[..., 3] = colours, classes
        return MaskItem(index)

    def _random_place(
        self, rng: np.random.Generator, size_wh: tuple[int, int], spec: SegmentationAugmentSpec
    ) -> FittedPlace:
        smallest, largest = spec.random_scale
        zoom = float(rng.uniform(smallest, largest))
        width, height = fitted_size(size_wh, side=self._side, resize=self._resize, zoom=zoom)
        across, down = rng.random(2)
        return FittedPlace(width, height, round((self._side - width) * across), round((self._side - height) * down))

    def collate(self, samples: Sequence[MaskItem]) -> dict[str, Array]:
        """Combine samples to a micro batch: ``pixels`` uint8 (B, S, S, 4) (unless the loader has it), ``index`` int64
        (B,)."""
        batch: dict[str, Array] = {"index": np.array([item.index for item in samples], dtype=np.int64)}
        pixels = [item.pixels for item in samples if item.pixels is not None]
        return {"pixels": np.stack(pixels), **batch} if pixels else batch


def _vary(
    rng: np.random.Generator, spec: SegmentationAugmentSpec, colours: NDArray[np.uint8], classes: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Change the colours, and flip image and mask."""
    gains = random_gains(rng, spec)
    if gains != (1.0, 1.0, 1.0):
        scale_hsv(colours, gains)
    up_down, left_right = rng.random(2) < (spec.flip_ud, spec.flip_lr)
    if up_down or left_right:
        code = -1 if up_down and left_right else int(left_right)
        colours, classes = (np.asarray(cv2.flip(x, code), dtype=np.uint8) for x in (colours, classes))
    return colours, classes
