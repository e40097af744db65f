"""The ``digits_masks`` data set: handwritten digits of scikit-learn on generated canvases, with a mask of their ink.

The canvases are those of the data set ``digits``. The files are in the form of ``voc_masks``; nothing is downloaded.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.generated import MadeSet
from mtrain.tasks.segmentation.masks import MaskedImages
from mtrain.tasks.segmentation.readers.voc_masks import CLASS_FILE, VocMasks

NAMES = ("background", *(str(digit) for digit in range(10)))
INK_NAMES = ("background", "ink")
_FORMAT = 1
"""Version of the generator; increased when the same seed gives other files."""


class DigitsMasksOptions(PluginOptions):
    """Number, size and seed of the canvases."""

    train: int = Field(default=320, gt=0, description="canvases of the training split")
    val: int = Field(default=64, gt=0, description="canvases of the evaluation split")
    size: int = Field(default=64, ge=64, le=4096, description="side of a canvas in pixels")
    seed: int = Field(default=0, ge=0, description="random seed of the layout")
    classes: Literal["digits", "ink"] = Field(
        default="digits",
        description="digits: background and ten digits; ink: background and ink, which is learnt sooner",
    )


class DigitsMasks(Dataset):
    """The ``digits_masks`` data set plugin: generated at its first use in ``data.root``, by default in the user's cache
    folder."""

    kind: ClassVar[str] = "segmentation"
    Options = DigitsMasksOptions
    made_on_first_use: ClassVar[bool] = True

    options: DigitsMasksOptions

    def read(self, request: SplitRequest) -> MaskedImages:
        """Read one split; generate the set first if it does not exist.

        Raises:
            DataError: ``root`` holds something else, or cannot be written.
        """
        made = MadeSet(name="digits-masks", mark="digits_masks.json", format=_FORMAT, options=self.options.model_dump())
        folder = made.make(request.root or made.default_folder(), self._write)
        return VocMasks().read(replace(request, root=folder))

    def _write(self, folder: Path) -> None:
        # Imported here so that printing a plan needs no image library.
        from mtrain.data.images.digits_canvas import canvas
        from mtrain.data.images.drawing import save_image
        from mtrain.data.images.indexed import write_indices

        lists = folder / "ImageSets" / "Segmentation"
        lists.mkdir(parents=True)
        options = self.options
        splits: tuple[tuple[Literal["train", "val"], int], ...] = (("train", options.train), ("val", options.val))
        for split, count in splits:
            keys = [f"{split}_{index:06d}" for index in range(count)]
            for index, key in enumerate(keys):
                drawn = canvas(split, index, size=options.size, seed=options.seed)
                save_image(drawn.image, folder / "JPEGImages" / f"{key}.png")
                write_indices(self._classes(drawn.mask), folder / "SegmentationClass" / f"{key}.png")
            (lists / f"{split}.txt").write_text("\n".join(keys) + "\n", "utf-8")
        names = NAMES if options.classes == "digits" else INK_NAMES
        (folder / CLASS_FILE).write_text("\n".join(names) + "\n", "utf-8")

    def _classes(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the classes of a canvas as the options have them."""
        table = [min(label, 1) if self.options.classes == "ink" and label <= 10 else label for label in range(256)]
        return np.array(table, dtype=np.uint8)[mask]
