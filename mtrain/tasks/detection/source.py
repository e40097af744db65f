"""Create detection samples for the loader, each a pure function of (seed, epoch, update, index)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.inputs import (
    LetterboxEvaluation,
    LetterboxTraining,
    ScalePad,
    StretchEvaluation,
    StretchTraining,
    Transformed,
    View,
)
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec

Resize = Literal["letterbox", "stretch"]
Decode = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True, eq=False)
class DetectionItem:
    """One sample in the form that goes into a batch."""

    index: int
    targets: NDArray[np.float32]
    """(N, 5) rows ``[class, xc, yc, w, h]``, normalised."""
    scale_pad: ScalePad
    """Map from the original image to the input; (1, 1, 0, 0) for training images, which are not mapped back."""
    image: NDArray[np.uint8] | None = None
    """(S, S, 3) RGB; None if it lies in shared memory."""


class DetectionSource:
    """One split as samples, augmented if ``augment`` is set, else for evaluation.

    Implements ``core.interfaces.Source``; the loader uses ``fill``, which writes the image to shared memory.
    """

    def __init__(  # noqa: PLR0913 - the keywords are those of the spec's section
        self,
        annotations: Annotations,
        *,
        image_size: int,
        resize: Resize = "letterbox",
        augment: AugmentSpec | None = None,
        seed: int = 0,
        epochs: int | None = None,
        decode: Decode = "exact",
    ) -> None:
        """Open a split.

        Args:
            annotations: Images with boxes.
            image_size: Side of the input in pixels.
            resize: How images are fitted into it.
            augment: Changes of training images; None: for evaluation.
            seed: Of all random changes.
            epochs: Length of the job, from which ``close_mosaic_epochs`` finds the last ones; None: no end.
            decode: How JPEGs are decoded for evaluation; those for training always are decoded fast.
        """
        samples = annotations.samples
        self._view: View
        if augment is None:
            evaluation = LetterboxEvaluation if resize == "letterbox" else StretchEvaluation
            self._view = evaluation(samples, side=image_size, exact=decode == "exact")
        elif resize == "letterbox":
            self._view = LetterboxTraining(samples, augment, side=image_size, seed=seed, epochs=epochs)
        else:
            self._view = StretchTraining(samples, augment, side=image_size, seed=seed)
        if augment is not None and augment.albumentations is not None:
            self._view = Transformed(self._view, augment.albumentations, seed=seed)
        self.images = self._view.images
        self.array = ArraySpec("images", (self._view.largest, self._view.largest, 3))

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        """Return the sample's image file, for error messages."""
        return str(self.images.path(index % len(self)))

    def shape(self, epoch: int, update: int) -> tuple[int, int, int]:
        """Return the shape (S, S, 3) of the images of one update."""
        side = self._view.side(epoch, update)
        return side, side, 3

    def sample(self, epoch: int, index: int, *, update: int = 0) -> DetectionItem:
        """Return one sample with its image. Its augmentation, including the images combined with it, depends on
        (seed, epoch, index); side and interpolation on (seed, epoch, update)."""
        image = np.empty(self.shape(epoch, update), dtype=np.uint8)
        item = self.fill(epoch, index, image, update=update)
        return DetectionItem(item.index, item.targets, item.scale_pad, image)

    def fill(self, epoch: int, index: int, out: Array, *, update: int = 0) -> DetectionItem:
        """Prepare a sample like ``sample``, with the image written to ``out`` (S, S, 3) uint8 instead of the result.

        Raises:
            DataError: the image, or another one of its mosaic, is unreadable.

        """
        rows, scale_pad = self._view.draw((epoch, update, index), out)
        return DetectionItem(index % len(self), rows, scale_pad)

    def collate(self, samples: Sequence[DetectionItem]) -> dict[str, Array]:
        """Combine samples to a micro batch.

        ``images`` uint8 (B, S, S, 3) RGB (unless the loader has it), ``targets`` float32 (T, 6) rows
        ``[image in batch, class, xc, yc, w, h]``, ``index`` int64 (B,), ``scale_pad`` float32 (B, 4).
        """
        counts = [len(item.targets) for item in samples]
        rows = np.empty((sum(counts), 6), dtype=np.float32)
        rows[:, 0] = np.repeat(np.arange(len(samples)), counts)
        rows[:, 1:] = np.concatenate([item.targets for item in samples])
        batch: dict[str, Array] = {
            "targets": rows,
            "index": np.array([item.index for item in samples], dtype=np.int64),
            "scale_pad": np.array([item.scale_pad for item in samples], dtype=np.float32),
        }
        images = [item.image for item in samples if item.image is not None]
        return {"images": np.stack(images), **batch} if images else batch


def open_sources(
    data: DetectionDataSpec, train: Annotations | None, val: Annotations | None, *, seed: int, epochs: int | None = None
) -> dict[Literal["train", "val"], DetectionSource]:
    """Create the sources of a job as ``data`` describes them; a split that is None is left out.

    Raises:
        SpecError: the RAM cache does not fit into memory.
        DataError: the folder of the disk cache cannot be made.

    """
    sources: dict[Literal["train", "val"], DetectionSource] = {}
    if train is not None:
        sources["train"] = DetectionSource(
            train, image_size=data.image_size, resize=data.resize, augment=data.augment, seed=seed, epochs=epochs
        )
    if val is not None:
        sources["val"] = DetectionSource(val, image_size=data.image_size, resize=data.resize, decode=data.decode)
    for source in sources.values():
        source.images.keep(data.cache, Path(data.cache_dir).expanduser() if data.cache_dir else None)
    return sources
