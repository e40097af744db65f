"""Draw one training image as in the YOLOv5 documentation: mosaic or letterbox, random map, mixup, colours, flips."""

from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.geometry import EDGE_PX, fitted_size, random_map
from mtrain.data.images.hsv_flip import Labelled, finish
from mtrain.tasks.detection.augment import mosaic
from mtrain.tasks.detection.augment.render import Renderer
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.section import AugmentSpec

MIX_BETA = 32.0
"""Parameter of the Beta(32, 32) distribution from which mixup draws the first image's weight: close to a half."""


class Augmenter:
    """Draw augmented images. All randomness comes from the generator passed to each call."""

    def __init__(self, images: Images, spec: AugmentSpec) -> None:
        self._images = images
        self._spec = spec
        self._renderer = Renderer(images)
        self._second = np.empty((0, 0, 3), dtype=np.uint8)

    def draw(
        self, rng: np.random.Generator, index: int, out: NDArray[np.uint8], *, mosaics: bool = True
    ) -> NDArray[np.float32]:
        """Fill ``out`` (S, S, 3) RGB with sample ``index``, augmented.

        Returns (N, 5) rows ``[class, xc, yc, w, h]``, normalised. Without ``mosaics`` the image is letterboxed.

        Raises:
            DataError: an image, including those combined with it, is unreadable; it is named.

        """
        spec, side = self._spec, len(out)
        if rng.random() < spec.mosaic and mosaics:
            boxes, labels = self._mosaic(rng, index, out)
            if rng.random() < spec.mixup:
                boxes, labels = self._mix_up(rng, (boxes, labels), out)
        else:
            layout = mosaic.alone(index, self._size_at(side), side)
            matrix, zoom = random_map(rng, spec, canvas=side, side=side)
            boxes, labels = self._renderer.draw(layout, matrix, zoom, out)
        return finish(rng, spec, (boxes, labels), out, edge_px=EDGE_PX)

    def _size_at(self, side: int) -> Callable[[int], tuple[int, int]]:
        """Return a function from a sample to the (width, height) of its image, its longest side scaled to the
        output's."""
        return lambda index: fitted_size(*self._images.original_size(index), side)

    def _mosaic(self, rng: np.random.Generator, index: int, out: NDArray[np.uint8]) -> Labelled:
        layout_of, count = (mosaic.nine, 9) if rng.random() < self._spec.mosaic9 else (mosaic.four, 4)
        indices = [index, *rng.integers(len(self._images), size=count - 1).tolist()]
        if count == 4:
            # Only a mosaic of four is shuffled: in one of nine the sample itself stays in the middle.
            indices = rng.permutation(indices).tolist()
        side = len(out)
        layout = layout_of(indices, self._size_at(side), side, rng)
        matrix, zoom = random_map(rng, self._spec, canvas=layout.canvas, side=side)
        return self._renderer.draw(layout, matrix, zoom, out)

    def _mix_up(self, rng: np.random.Generator, first: Labelled, out: NDArray[np.uint8]) -> Labelled:
        """Blend ``out`` with another mosaic; the boxes of both count fully (mixup: Zhang et al. 2018)."""
        if self._second.shape != out.shape:  # multi-scale training changes the side between updates
            self._second = np.empty_like(out)
        boxes, labels = self._mosaic(rng, int(rng.integers(len(self._images))), self._second)
        share = float(rng.beta(MIX_BETA, MIX_BETA))
        cv2.addWeighted(out, share, self._second, 1.0 - share, 0.0, dst=out)
        return np.concatenate([first[0], boxes]), np.concatenate([first[1], labels])
