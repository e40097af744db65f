"""The ``voc_masks`` data set: pictures and masks in the folders of Pascal VOC's segmentation challenge.

``JPEGImages`` holds the pictures, ``SegmentationClass`` a PNG of class indices for each, ``ImageSets/Segmentation`` a list
of names for each split. The index 255 marks pixels that count nowhere. Everingham et al. 2010.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset
from mtrain.data.reading import FOLDERS_OF, Split, first_existing, lines_of, listed, need_root, need_unique, pictures_in
from mtrain.errors import DataError
from mtrain.tasks.segmentation.masks import MaskedPictures

NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The classes of Pascal VOC by their index."""
MAX_CLASSES = 255
CLASS_FILE = "classes.txt"
"""File in ``data.root`` with a class name a line, in the order of the indices."""


class VocMasksOptions(BaseModel):
    """Names of the folders."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    masks: str = Field(default="SegmentationClass", description="folder of the masks")
    lists: str = Field(
        default="ImageSets/Segmentation", description="folder of the lists of names, train.txt and val.txt"
    )


class VocMasks(Dataset):
    """The ``voc_masks`` data set plugin."""

    kind: ClassVar[str] = "segmentation"
    Options = VocMasksOptions

    def __init__(self, options: VocMasksOptions | None = None) -> None:
        self.options = options or VocMasksOptions()

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> MaskedPictures:
        """Find the pictures of one split and their masks; no picture is read.

        Raises:
            DataError: a folder, a list, a picture or a mask is missing, or a name occurs twice.
        """
        root = need_root(root, "voc_masks")
        folder = first_existing([root / (images or "JPEGImages")], what="folder of pictures", key="data.images")
        masks = first_existing([root / self.options.masks], what="folder of masks", key="data.options.masks")
        pictures = {path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_in(folder)}
        keys, place = self._keys(root, split_value, masks, split)
        missing = [f"{key}: no picture in {folder}" for key in keys if key not in pictures]
        missing += [f"{key}: no mask {masks / key}.png" for key in keys if not (masks / f"{key}.png").is_file()]
        if missing:
            raise DataError(f"{place}: {len(missing)} files of {len(keys)} names are missing:\n{listed(missing)}")
        return MaskedPictures(
            pictures=[pictures[key] for key in keys],
            masks=[masks / f"{key}.png" for key in keys],
            class_names=_class_names(root, names),
            keys=keys,
        )

    def _keys(self, root: Path, value: str | None, masks: Path, split: Split) -> tuple[list[str], Path]:
        """Return the names of a split's pictures, without suffix, and where they come from."""
        if split == "all" and value is None:
            found = [path.relative_to(masks).with_suffix("").as_posix() for path in pictures_in(masks)]
            return found, masks
        lists = root / self.options.lists
        candidates = [root / value] if value is not None else [lists / f"{name}.txt" for name in FOLDERS_OF[split]]
        remedy = ", or a share of all pictures with data.split (0.2)"
        file = first_existing(candidates, what=f"list of the {split} split", key=f"data.{split}", remedy=remedy)
        keys = lines_of(file)
        need_unique(keys, where=str(file), what="names of pictures")
        return keys, file


def _class_names(root: Path, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the classes: ``data.names``, else those of the class file, else Pascal VOC's.

    Raises:
        DataError: there are more than 255, or one occurs twice.
    """
    file = root / CLASS_FILE
    found = tuple(names) if names is not None else tuple(lines_of(file)) if file.is_file() else NAMES
    where = "data.names" if names is not None else str(file)
    if not 1 <= len(found) <= MAX_CLASSES:
        raise DataError(
            f"{where}: {len(found)} classes; expected 1 to {MAX_CLASSES}, since masks have one byte a pixel"
        )
    need_unique(found, where=where, what="class names")
    return found
