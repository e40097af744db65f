"""The embedded detection data set: handwritten digits of scikit-learn on generated canvases, written in COCO form.

The pen strokes are real (UCI "Optical Recognition of Handwritten Digits", 1797 pictures of 8 x 8, CC BY 4.0), the
layout is generated: nothing is downloaded. Canvas i of a split is a function of (seed, split, i) alone, so a larger set
begins with the smaller one."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset
from mtrain.data.reading import Split
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.coco import Coco

NAMES = tuple(str(digit) for digit in range(10))
_FORMAT = 1
"""Version of the generator; increased when the same seed gives other canvases."""
_MARK = "digits.json"


class DigitsOptions(BaseModel):
    """Number, size and seed of the canvases."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    train: int = Field(default=400, gt=0, description="canvases of the training split")
    val: int = Field(default=100, gt=0, description="canvases of the evaluation split")
    size: int = Field(default=320, ge=64, le=4096, description="side of a canvas in pixels")
    seed: int = Field(default=0, ge=0, description="random seed of the layout")
    suffix: Literal["jpg", "png"] = Field(default="jpg", description="kind of the picture files")


class Digits(Dataset):
    """The ``digits`` data set plugin: generated at its first use in ``data.root``, by default in the user's cache
    folder."""

    kind: ClassVar[str] = "detection"
    Options = DigitsOptions
    made_on_first_use: ClassVar[bool] = True

    def __init__(self, options: DigitsOptions | None = None) -> None:
        self.options = options or DigitsOptions()

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> Annotations:
        """Read one split; generate the set first if it does not exist.

        Raises:
            DataError: ``root`` holds something else, or cannot be written.

        """
        folder = make_digits(root or default_folder(self.options), self.options)
        return Coco().read(folder, split_value, images or "images", names, split=split)


def default_folder(options: DigitsOptions) -> Path:
    """Return the folder for a set with these options if ``data.root`` is not set."""
    key = hashlib.sha256(_mark(options).encode()).hexdigest()[:12]
    return Path.home() / ".cache" / "mtrain" / f"digits-{key}"


def _mark(options: DigitsOptions) -> str:
    return json.dumps({"format": _FORMAT, **options.model_dump()}, sort_keys=True)


def make_digits(directory: Path, options: DigitsOptions) -> Path:
    """Write the set to ``directory`` unless it exists already. Return ``directory``.

    It is built in a temporary folder and renamed into place: several processes may do this at once, and a killed one
    leaves no incomplete set.

    Raises:
        DataError: ``directory`` holds something else, or cannot be written.

    """
    if _is_made(directory, options):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            building.chmod(0o755)
            _write(building, options)
            _move(building, directory, options)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{directory}: the digits cannot be written ({error.strerror}); set data.root") from error
    return directory


def _is_made(directory: Path, options: DigitsOptions) -> bool:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    mark_file = directory / _MARK
    if not mark_file.is_file():
        raise DataError(f"{directory}: holds something else than the digits; name another or an empty folder")
    existing_mark = mark_file.read_text("utf-8")
    if existing_mark != _mark(options):
        raise DataError(
            f"{directory}: made with {existing_mark}, asked for {_mark(options)}; name another folder or remove it"
        )
    return True


def _move(building: Path, directory: Path, options: DigitsOptions) -> None:
    try:
        os.rename(building, directory)  # replaces an empty folder, fails on a full one
    except OSError:
        if not _is_made(directory, options):  # otherwise another process was faster, with the same result
            raise


def _write(folder: Path, options: DigitsOptions) -> None:
    from mtrain.data.images.drawing import save_picture
    from mtrain.tasks.detection.readers.digits_canvas import (
        canvas,  # imported here so that printing a plan needs no image library
    )

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
            picture, boxes, labels = canvas(split, index, size=options.size, seed=options.seed)
            name = f"{split}_{index:06d}.{options.suffix}"
            save_picture(picture, folder / "images" / name)
            content["images"].append(
                {"id": index + 1, "file_name": name, "width": options.size, "height": options.size}
            )
            for (x1, y1, x2, y2), label in zip(boxes.tolist(), labels.tolist(), strict=True):
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
    (folder / _MARK).write_text(_mark(options), "utf-8")
