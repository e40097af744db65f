"""Detection samples as a pure function of (seed, epoch, index): what the loader asks for, for training and
evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array
from mtrain.core.spec import AugmentSpec, DataSpec
from mtrain.data.augment import Augmenter
from mtrain.data.geometry import FILL, margin, targets
from mtrain.data.pictures import Pictures
from mtrain.data.ring import ArraySpec
from mtrain.data.sample import Annotations


@dataclass(frozen=True, slots=True, eq=False)
class DetectionItem:
    """One sample as it goes into a batch."""

    index: int
    targets: NDArray[np.float32]
    """(N, 5) rows ``[class, xc, yc, w, h]``, normalised."""
    scale_pad: tuple[float, float, float, float]
    """ratio_w, ratio_h, pad_w, pad_h: a position in the original picture x ratio + pad is one in the network's input.
    Training pictures, of which there is no way back: 1, 1, 0, 0."""
    image: NDArray[np.uint8] | None = None
    """(S, S, 3) RGB; None: it lies in shared memory."""


class DetectionSource:
    """One split as samples: augmented where ``augment`` is given, else letterboxed for evaluation.

    Implements ``core.interfaces.Source``; the loader uses ``fill``, which writes the picture where it is to lie.
    """

    def __init__(
        self,
        annotations: Annotations,
        *,
        image_size: int,
        augment: AugmentSpec | None = None,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        """``epochs``: length of the job, so that ``close_mosaic_epochs`` knows which are the last; None: there is no
        end."""
        self.pictures = Pictures(annotations.samples, side=image_size, exact=augment is None)
        self.array = ArraySpec("images", (image_size, image_size, 3))
        self._side = image_size
        self._seed = seed
        self._last_mosaic = np.inf if augment is None or epochs is None else epochs - augment.close_mosaic_epochs
        self._augmenter = None if augment is None else Augmenter(self.pictures, augment, side=image_size)

    def __len__(self) -> int:
        return len(self.pictures)

    def describe(self, index: int) -> str:
        """The sample's picture file, for error messages."""
        return str(self.pictures.path(index))

    def sample(self, epoch: int, index: int) -> DetectionItem:
        """One sample with its picture; augmentation is keyed by (seed, epoch, index), partners included."""
        image = np.empty(self.array.shape, dtype=np.uint8)
        item = self.fill(epoch, index, image)
        return DetectionItem(item.index, item.targets, item.scale_pad, image)

    def fill(self, epoch: int, index: int, out: Array) -> DetectionItem:
        """``sample`` with the picture written to ``out`` (S, S, 3) uint8.

        Raises:
            DataError: the picture, or one of a mosaic's others, is unreadable.

        """
        if self._augmenter is None:
            return self._letterboxed(index, out)
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch, index]))
        rows = self._augmenter.draw(rng, index, out, mosaics=epoch < self._last_mosaic)
        return DetectionItem(index, rows, (1.0, 1.0, 0.0, 0.0))

    def collate(self, samples: Sequence[DetectionItem]) -> dict[str, Array]:
        """A micro batch.

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

    def _letterboxed(self, index: int, out: Array) -> DetectionItem:
        picture = self.pictures.load(index)
        height, width = picture.shape[:2]
        pad_w, pad_h = (self._side - width) / 2, (self._side - height) / 2
        top, left = margin(pad_h), margin(pad_w)
        out.fill(FILL)
        out[top : top + height, left : left + width] = picture
        fractions, labels = self.pictures.boxes(index)
        boxes = fractions * (np.array([width, height] * 2)) + np.array([pad_w, pad_h] * 2)
        original = self.pictures.original_size(index)
        return DetectionItem(
            index, targets(boxes, labels, self._side), (width / original[0], height / original[1], pad_w, pad_h)
        )


def open_sources(
    data: DataSpec, train: Annotations | None, val: Annotations | None, *, seed: int, epochs: int | None = None
) -> dict[Literal["train", "val"], DetectionSource]:
    """The sources of a job as ``data`` describes them; a split that is None is left out.

    Raises:
        SpecError: the RAM cache does not fit into memory.
        DataError: the folder of the disk cache cannot be made.

    """
    sources: dict[Literal["train", "val"], DetectionSource] = {}
    if train is not None:
        sources["train"] = DetectionSource(
            train, image_size=data.image_size, augment=data.augment, seed=seed, epochs=epochs
        )
    if val is not None:
        sources["val"] = DetectionSource(val, image_size=data.image_size)
    for source in sources.values():
        source.pictures.keep(data.cache, Path(data.cache_dir).expanduser() if data.cache_dir else None)
    return sources
