"""The embedded detection data set: handwritten digits of scikit-learn on generated canvases, written in COCO form.

The pen strokes are real (UCI "Optical Recognition of Handwritten Digits", 1797 images of 8 x 8, CC BY 4.0), the
layout is generated: nothing is downloaded. Canvas i of a split is a function of (seed, split, i) alone, so a larger set
begins with the smaller one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.generated import MadeSet
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.coco import Coco

NAMES = tuple(str(digit) for digit in range(10))
_FORMAT = 1
"""Version of the generator; increased when the same seed gives other canvases."""
_MARK = "digits.json"


class DigitsOptions(PluginOptions):
    """Number, size and seed of the canvases."""

    train: int = Field(default=400, gt=0, description="canvases of the training split")
    val: int = Field(default=100, gt=0, description="canvases of the evaluation split")
    size: int = Field(default=320, ge=64, le=4096, description="side of a canvas in pixels")
    seed: int = Field(default=0, ge=0, description="random seed of the layout")
    suffix: Literal["jpg", "png"] = Field(default="jpg", description="kind of the image files")


class Digits(Dataset):
    """The ``digits`` data set plugin: generated at its first use in ``data.root``, by default in the user's cache
    folder."""

    kind: ClassVar[str] = "detection"
    Options = DigitsOptions
    made_on_first_use: ClassVar[bool] = True

    options: DigitsOptions

    def read(self, request: SplitRequest) -> Annotations:
        """Read one split; generate the set first if it does not exist.

        Raises:
            DataError: ``root`` holds something else, or cannot be written.

        """
        folder = make_digits(request.root or default_folder(self.options), self.options)
        return Coco().read(replace(request, root=folder, images=request.images or "images"))


def default_folder(options: DigitsOptions) -> Path:
    """Return the folder for a set with these options if ``data.root`` is not set."""
    return _make_set(options).default_folder()


def make_digits(directory: Path, options: DigitsOptions) -> Path:
    """Write the set to ``directory`` unless it exists already, see ``MadeSet.make``. Return ``directory``.

    Raises:
        DataError: ``directory`` holds something else, or cannot be written.

    """
    return _make_set(options).make(directory, lambda folder: _write(folder, options))


def _make_set(options: DigitsOptions) -> MadeSet:
    return MadeSet(name="digits", mark=_MARK, format=_FORMAT, options=options.model_dump())


def _write(folder: Path, options: DigitsOptions) -> None:
    # Imported here so that printing a plan needs no image library.
    from mtrain.data.images.digits_canvas import canvas
    from mtrain.data.images.drawing import save_image

    (folder / "annotations").mkdir()
    (folder / "images").mkdir()
    splits: tuple[tuple[Literal["train", "val"], int], ...] = (("train", options.train), ("val", options.val))
    for split, count in splits:
        content: dict[str, Any] = {
            "info": {"description": "handwritten digits on canvases", "seed": options.seed, "split": split},
            "images": [],
            "annotations": [],
            "categories": [{"id": i, "name": name} for i, name in enumerate(NAMES, start=1)],
        }
        for index in range(count):
            drawn = canvas(split, index, size=options.size, seed=options.seed)
            name = f"{split}_{index:06d}.{options.suffix}"
            save_image(drawn.image, folder / "images" / name)
            content["images"].append(
                {"id": index + 1, "file_name": name, "width": options.size, "height": options.size}
            )
            for (x1, y1, x2, y2), label in zip(drawn.boxes.tolist(), drawn.labels.tolist(), strict=True):
                content["annotations"].append(
                    {
                        "id": len(content["annotations"]) + 1,
                        "image_id": index + 1,
                        "category_id": label + 1,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "area": (x2 - x1) * (y2 - y1),
                        "iscrowd": 0,
                    }
                )
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content), "utf-8")
