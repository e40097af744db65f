"""Create classification samples for the loader, each a pure function of (seed, epoch, index)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array
from mtrain.data.images.crop import centre_cropped, random_window, window_of
from mtrain.data.images.geometry import MAP_DRAWS, letterbox, random_map
from mtrain.data.images.hsv_flip import finish
from mtrain.data.images.pipelines import Pipeline, need_repeatable
from mtrain.data.images.section import VariationSpec
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.tasks.classification.labels import Images, LabelledImages
from mtrain.tasks.classification.section import ClassificationAugmentSpec

_HALF = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
"""Shift by half a pixel: OpenCV's coordinates are whole at pixel centres, those of ``random_map`` at pixel corners. In
images of 8 x 8 pixels the difference is visible."""
_NO_BOXES = (np.zeros((0, 4)), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class ClassItem:
    """One sample in the form that goes into a batch."""

    index: int
    label: int
    image: NDArray[np.uint8] | None = None
    """(S, S, 3) RGB; None if it lies in shared memory."""


Resize = Literal["crop", "letterbox", "stretch"]


class ClassificationSource:
    """One split as samples, augmented if ``augment`` is set. Implements ``mtrain.data.loader.source_ring.PooledSource``."""

    def __init__(
        self,
        split: LabelledImages,
        *,
        side: int,
        resize: Resize = "letterbox",
        crop_share: float = 1.0,
        augment: VariationSpec | None = None,
        seed: int = 0,
    ) -> None:
        self._split = split
        self._side, self._resize, self._crop_share = side, resize, crop_share
        self._augment = augment
        self._random_crop = augment.random_crop if isinstance(augment, ClassificationAugmentSpec) else None
        reference = augment.albumentations if isinstance(augment, ClassificationAugmentSpec) else None
        self._pipeline = Pipeline(reference) if reference is not None else None
        self._seed = seed
        self._images: Images = split.images
        # An array is brought to the input's size once; images that are decoded when they
        # are needed, each time. A window or a pipeline needs the image in its own size.
        self._are_fitted = isinstance(split.images, np.ndarray) and not self._crops and not self._pipeline
        if self._are_fitted:
            self._images = np.stack([self._fit(image) for image in split.images])  # type: ignore[attr-defined]
        self.array = ArraySpec("images", (side, side, 3))
        if self._pipeline is not None:
            # A pipeline that draws from other generators than its own would change the samples of a resumed job.
            need_repeatable(lambda index: self.sample(0, index).image, len(self), self._pipeline.reference)

    @property
    def _crops(self) -> bool:
        """Whether a random window of each image becomes the input."""
        return self._resize == "crop" and self._random_crop is not None

    def __len__(self) -> int:
        return len(self._split)

    def describe(self, index: int) -> str:
        """Return the origin of the sample's image, for error messages."""
        return self._split.origins[index]

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        """Return the shape (S, S, 3), which is always the same."""
        return self.array.shape

    def sample(self, epoch: int, index: int, *, update: int = 0) -> ClassItem:
        """Return one sample with its image; augmentation depends on (seed, epoch, index)."""
        image = np.empty(self.array.shape, dtype=np.uint8)
        item = self.fill(epoch, index, image, update=update)
        return ClassItem(item.index, item.label, image)

    def fill(self, epoch: int, index: int, out: Array, *, update: int = 0) -> ClassItem:
        """Prepare a sample like ``sample``, with the image written to ``out`` (S, S, 3) uint8.

        Raises:
            DataError: the image cannot be read.
        """
        image = self._images[index]
        if self._augment is None:
            out[...] = image if self._are_fitted else self._fit(image)
            return ClassItem(index, int(self._split.labels[index]))
        if self._pipeline is not None:
            result = self._pipeline.apply(image, (self._seed, epoch, index), origin=self.describe(index))
            out[...] = result if result.shape == self.array.shape else self._fit(result)
            return ClassItem(index, int(self._split.labels[index]))
        # A generator for each sample: it is the same on any number of ranks and loader processes, and after a resume.
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch, index]))
        if self._crops and self._random_crop is not None:
            spec = self._random_crop
            size_wh = (image.shape[1], image.shape[0])
            window = random_window(rng, size_wh, scale=spec.scale, aspect_ratio=spec.aspect_ratio)
            out[...] = window_of(image, window, side=self._side)
        else:
            out[...] = image if self._are_fitted else self._fit(image)
        _vary(out, self._augment, rng)
        return ClassItem(index, int(self._split.labels[index]))

    def _fit(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return fit_image(image, side=self._side, resize=self._resize, crop_share=self._crop_share)

    def collate(self, samples: Sequence[ClassItem]) -> dict[str, Array]:
        """Combine samples to a micro batch: ``images`` uint8 (B, S, S, 3) RGB (unless the loader has it), ``labels``
        and ``index`` int64 (B,)."""
        batch: dict[str, Array] = {
            "labels": np.array([item.label for item in samples], dtype=np.int64),
            "index": np.array([item.index for item in samples], dtype=np.int64),
        }
        images = [item.image for item in samples if item.image is not None]
        return {"images": np.stack(images), **batch} if images else batch


def fit_image(image: NDArray[np.uint8], *, side: int, resize: Resize, crop_share: float = 1.0) -> NDArray[np.uint8]:
    """Bring an image (H, W, 3) to (side, side, 3): its centre cut out, letterboxed on grey, or stretched.

    Letterboxing and stretching leave an image of that size as it is.
    """
    if resize == "crop":
        return centre_cropped(image, side=side, share=crop_share)
    if image.shape[:2] == (side, side):
        return image
    if resize == "letterbox":
        return letterbox(image, (side, side))
    method = cv2.INTER_AREA if side < max(image.shape[:2]) else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (side, side), interpolation=method), dtype=np.uint8)


def _vary(out: Array, spec: VariationSpec, rng: np.random.Generator) -> None:
    """Map ``out`` about its centre, extending its edges outwards; then change colours and flip. In place."""
    side = len(out)
    # Nothing is warped by the identity, but what is drawn later must not depend on that.
    if not any((spec.perspective, spec.degrees, spec.scale, spec.shear, spec.translate)):
        rng.random(MAP_DRAWS)
    else:
        matrix, _ = random_map(rng, spec, canvas=side, side=side)
        moved = np.linalg.inv(_HALF) @ matrix @ _HALF
        out[...] = cv2.warpPerspective(
            out, moved, (side, side), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
        )
    finish(rng, spec, _NO_BOXES, out, edge_px=0.0)
