"""Turn the images of a split into network inputs: augmented or for evaluation, letterboxed or stretched."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.geometry import EDGE_PX, FILL, fitted_size, margin, random_map, targets
from mtrain.data.images.hsv_flip import Labelled, finish
from mtrain.data.images.pipelines import Pipeline, need_repeatable
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Sample
from mtrain.tasks.detection.augment import mosaic
from mtrain.tasks.detection.augment.render import Renderer
from mtrain.tasks.detection.augment.stretched import Stretcher, shared_by_update, sides_of
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.section import AugmentSpec

ScalePad = tuple[float, float, float, float]
"""ratio_w, ratio_h, pad_w, pad_h: original position x ratio + pad = position in the network's input."""
NO_WAY_BACK: ScalePad = (1.0, 1.0, 0.0, 0.0)
"""Scale and pad of training images, whose positions are not mapped back."""
Drawn = tuple[NDArray[np.float32], ScalePad]
"""(N, 5) rows ``[class, xc, yc, w, h]``, normalised, and the map of positions as :data:`ScalePad`."""
Key = tuple[int, int, int]
"""Epoch, update of the epoch, index of the sample: the values on which a sample may depend besides the seed.

The index of a repetition is higher by a multiple of the number of images: see ``core.samples.sampler.Drawn``.
"""


class View(Protocol):
    """A way to make network inputs from the images of a split."""

    images: Images
    largest: int
    """Largest side of an input, in pixels."""

    def side(self, epoch: int, update: int) -> int:
        """Return the side of the square inputs of one update, in pixels."""
        ...

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """Fill ``out`` (S, S, 3) RGB with a sample.

        Raises:
            DataError: the image, or another one of its mosaic, is unreadable.

        """
        ...


class TrainingView:
    """Base class of augmented images. Side and interpolation depend on (seed, epoch, update), all else on (seed, epoch,
    index)."""

    def __init__(self, images: Images, spec: AugmentSpec, *, side: int, seed: int) -> None:
        self.images = images
        self.largest = largest_side(spec, side)
        self._spec = spec
        self._image_size = side
        self._seed = seed

    def side(self, epoch: int, update: int) -> int:
        """Return the side drawn for the update; always the same without multi-scale training."""
        return self._drawn_for(epoch, update)[0]

    def _drawn_for(self, epoch: int, update: int) -> tuple[int, int]:
        return shared_by_update(self._spec, image_size=self._image_size, key=(self._seed, epoch, update))

    def _begin(self, key: Key) -> tuple[np.random.Generator, int]:
        """Return the sample's random numbers, and the number of its image."""
        # A repetition of an image in one epoch has a higher index, so its augmentation is drawn anew.
        epoch, _, index = key
        return np.random.Generator(np.random.PCG64([self._seed, epoch, index])), index % len(self.images)


def largest_side(spec: AugmentSpec, side: int) -> int:
    """Return the largest side of an input in pixels, where ``side`` is that of the spec."""
    return max(sides_of(spec, image_size=side))


class LetterboxTraining(TrainingView):
    """Augmented mosaics and letterboxed images."""

    def __init__(
        self, samples: Sequence[Sample], spec: AugmentSpec, *, side: int, seed: int, epochs: int | None
    ) -> None:
        """``epochs``: length of the job, from which ``close_mosaic_epochs`` finds the last ones; None: no end."""
        super().__init__(Images(samples, Sizing(largest_side(spec, side), "layout")), spec, side=side, seed=seed)
        self._last_mosaic = np.inf if epochs is None else epochs - spec.close_mosaic_epochs
        self._augmenter = Augmenter(self.images, spec)

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """See ``View.draw``."""
        rng, image = self._begin(key)
        return self._augmenter.draw(rng, image, out, mosaics=key[0] < self._last_mosaic), NO_WAY_BACK


class StretchTraining(TrainingView):
    """Augmented stretched images."""

    def __init__(self, samples: Sequence[Sample], spec: AugmentSpec, *, side: int, seed: int) -> None:
        # The smallest crop must still have as many pixels as the input;
        # the bound keeps the size finite where ``scaling`` is next to 0.
        least = round(largest_side(spec, side) / max(_narrowest(spec), 0.1))
        super().__init__(Images(samples, Sizing(least, "crop")), spec, side=side, seed=seed)
        self._stretcher = Stretcher(self.images, spec)

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """See ``View.draw``."""
        rng, image = self._begin(key)
        return self._stretcher.draw(rng, image, out, method=self._drawn_for(*key[:2])[1]), NO_WAY_BACK


def _narrowest(spec: AugmentSpec) -> float:
    """Return the shorter side of the smallest crop, as a share of the image's."""
    if spec.crop is None:
        return 1.0
    smallest_aspect, largest_aspect = spec.crop.aspect_ratio
    return spec.crop.scaling[0] * math.sqrt(min(smallest_aspect, 1 / max(largest_aspect, 1.0)))


class LetterboxEvaluation:
    """Unaugmented images, their longest side scaled to the input's, centred on grey."""

    def __init__(self, samples: Sequence[Sample], *, side: int, exact: bool = True) -> None:
        """``exact``: see ``Sizing.exact``."""
        self.images = Images(samples, Sizing(side, "letterbox", exact))
        self.largest = side

    def side(self, epoch: int, update: int) -> int:
        """Return the side, which is always the same."""
        return self.largest

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """See ``View.draw``."""
        image = self.images.load(key[2])
        height, width = image.shape[:2]
        pad_w, pad_h = centre(image, out)
        fractions, labels = self.images.boxes(key[2])
        boxes = fractions * (np.array([width, height] * 2)) + np.array([pad_w, pad_h] * 2)
        original = self.images.original_size(key[2])
        return targets(boxes, labels, self.largest, edge_px=EDGE_PX), (
            width / original[0],
            height / original[1],
            pad_w,
            pad_h,
        )


def centre(image: NDArray[np.uint8], out: NDArray[np.uint8]) -> tuple[float, float]:
    """Draw an image (H, W, 3) in the middle of ``out`` (S, S, 3), on grey; return the padding at the left and at the
    top, not rounded."""
    height, width = image.shape[:2]
    pad_w, pad_h = (out.shape[1] - width) / 2, (out.shape[0] - height) / 2
    top, left = margin(pad_h), margin(pad_w)
    out.fill(FILL)
    out[top : top + height, left : left + width] = image
    return pad_w, pad_h


class StretchEvaluation:
    """Unaugmented images, both sides scaled to the input's."""

    def __init__(self, samples: Sequence[Sample], *, side: int, exact: bool = True) -> None:
        """``exact``: see ``Sizing.exact``."""
        self.images = Images(samples, Sizing(side, "stretch", exact))
        self.largest = side

    def side(self, epoch: int, update: int) -> int:
        """Return the side, which is always the same."""
        return self.largest

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """See ``View.draw``."""
        out[...] = self.images.load(key[2])
        fractions, labels = self.images.boxes(key[2])
        width, height = self.images.original_size(key[2])
        scale_pad = (self.largest / width, self.largest / height, 0.0, 0.0)
        return targets(fractions * self.largest, labels, self.largest, edge_px=0.0), scale_pad


class Transformed:
    """Inputs of another view, after the pipeline of albumentations that ``data.augment.albumentations`` names."""

    def __init__(self, view: View, reference: str, *, seed: int) -> None:
        """Raises: ``DataError`` if the reference gives no pipeline, or one whose results do not repeat."""
        self.images, self.largest = view.images, view.largest
        self._view, self._seed = view, seed
        # Boxes are cut at the same distance from the edge as by the view itself, which has cut them once.
        self._edge_px = EDGE_PX if isinstance(view, LetterboxTraining) else 0.0
        self._pipeline = Pipeline(reference, boxes=True)
        need_repeatable(self._draw_image, len(self.images), reference)

    def side(self, epoch: int, update: int) -> int:
        """See ``View.side``."""
        return self._view.side(epoch, update)

    def draw(self, key: Key, out: NDArray[np.uint8]) -> Drawn:
        """See ``View.draw``.

        Raises:
            DataError: also if the pipeline fails, or changes the size of the input.
        """
        rows, scale_pad = self._view.draw(key, out)
        side, origin = len(out), str(self.images.path(key[2] % len(self.images)))
        centres, halves = rows[:, 1:3].astype(np.float64) * side, rows[:, 3:5].astype(np.float64) * (side / 2)
        boxes = np.concatenate([centres - halves, centres + halves], axis=1)
        seeds = (self._seed, key[0], key[2])
        labels = rows[:, 0].astype(np.int64)
        image, boxes, labels = self._pipeline.apply_with_boxes(out, boxes, labels, seeds, origin=origin)
        if image.shape != out.shape:
            raise DataError(
                f"data.augment.albumentations: {self._pipeline.reference} makes {image.shape[1]} x {image.shape[0]} pixels "
                f"of an input of {side} x {side}; leave out transforms that change the size, because it is applied last"
            )
        out[...] = image
        return targets(boxes, labels, side, edge_px=self._edge_px), scale_pad

    def _draw_image(self, index: int) -> NDArray[np.uint8]:
        side = self.side(0, 0)
        out = np.empty((side, side, 3), dtype=np.uint8)
        self.draw((0, 0, index), out)
        return out


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
        # The number is drawn in either case: closing mosaics must not shift what later draws give.
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
