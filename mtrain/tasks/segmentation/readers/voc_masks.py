"""The ``voc_masks`` data set: images and masks in the folders of Pascal VOC's segmentation challenge.

``JPEGImages`` holds the images, ``SegmentationClass`` a PNG of class indices for each, ``ImageSets/Segmentation`` a list
of names for each split. The index 255 marks pixels that count nowhere. Everingham et al. 2010.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, Split, SplitRequest
from mtrain.data.reading import FOLDERS_OF, first_existing, images_in, lines_of, listed, need_root, need_unique
from mtrain.errors import DataError
from mtrain.tasks.segmentation.masks import MaskedImages

NAMES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""The classes of Pascal VOC by their index."""
MAX_CLASSES = 255
CLASS_FILE = "classes.txt"
"""File in ``data.root`` with a class name a line, in the order of the indices."""


class VocMasksOptions(PluginOptions):
    """Names of the folders."""

    masks: str = Field(default="SegmentationClass", description="folder of the masks")
    lists: str = Field(
        default="ImageSets/Segmentation", description="folder of the lists of names, train.txt and val.txt"
    )


class VocMasks(Dataset):
    """The ``voc_masks`` data set plugin."""

    kind: ClassVar[str] = "segmentation"
    Options = VocMasksOptions

    options: VocMasksOptions

    def read(self, request: SplitRequest) -> MaskedImages:
        """Find the images of one split and their masks; no image is read.

        Raises:
            DataError: a folder, a list, an image or a mask is missing, or a name occurs twice.
        """
        root = need_root(request.root, "voc_masks")
        folder = first_existing([root / (request.images or "JPEGImages")], what="folder of images", key="data.images")
        masks = first_existing([root / self.options.masks], what="folder of masks", key="data.options.masks")
        paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in images_in(folder)}
        keys, place = self._keys(root, request.value, masks, request.split)
        missing = [f"{key}: no image in {folder}" for key in keys if key not in paths]
        missing += [f"{key}: no mask {masks / key}.png" for key in keys if not (masks / f"{key}.png").is_file()]
        if missing:
            raise DataError(f"{place}: {len(missing)} files of {len(keys)} names are missing:\n{listed(missing)}")
        return MaskedImages(
            images=[paths[key] for key in keys],
            masks=[masks / f"{key}.png" for key in keys],
            class_names=_class_names(root, request.names),
            keys=keys,
        )

    def _keys(self, root: Path, value: str | None, masks: Path, split: Split) -> tuple[list[str], Path]:
        """Return the names of a split's images, without suffix, and where they come from."""
        if split == "all" and value is None:
            found = [path.relative_to(masks).with_suffix("").as_posix() for path in images_in(masks)]
            return found, masks
        lists = root / self.options.lists
        candidates = [root / value] if value is not None else [lists / f"{name}.txt" for name in FOLDERS_OF[split]]
        remedy = ", or a share of all images with data.split (0.2)"
        file = first_existing(candidates, what=f"list of the {split} split", key=f"data.{split}", remedy=remedy)
        keys = lines_of(file)
        need_unique(keys, where=str(file), what="names of images")
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
