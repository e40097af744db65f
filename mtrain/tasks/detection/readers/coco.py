"""Annotations in COCO JSON form (https://cocodataset.org/#format-data), boxes only: ``segmentation`` is not read."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from mtrain.data.reading import FOLDERS_OF, Split, first_existing, need_root, need_unique, order_names, size_of
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations, Picture, assemble
from mtrain.tasks.detection.readers.coco_json import (
    CocoAnnotation,
    CocoCategory,
    CocoContent,
    CocoImage,
    Faults,
    add_dangling,
    checked,
    entry_name,
    read_coco_json,
    shown,
)


class Coco:
    """The ``coco`` data set plugin.

    ``data.train`` and ``data.val`` name annotation files; by default ``annotations/instances_<split>.json``, the same
    with ``2017``, or ``<split>/_annotations.coco.json``. ``data.images`` names the picture folder; by default
    ``images``, ``<split>2017``, ``images/<split>2017``, the root or the folder of the annotation file, whichever holds
    the first picture.
    """

    kind: ClassVar[str] = "detection"

    class Options(BaseModel):
        """The plugin has no options of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> Annotations:
        """One split.

        Raises:
            DataError: files are missing, the JSON is damaged, ids clash, annotations name an unknown picture or
                category, or ``names`` disagrees with the categories. All mistakes of one kind are listed.

        """
        root = need_root(root, "coco")
        file = annotation_file(root, split_value, split)
        content = read_coco_json(file)
        folder = _picture_folder(root, images, file, content.images)
        return _assembled(content, folder=folder, file=file, names=names)


def annotation_file(root: Path, value: str | None, split: Split) -> Path:
    """The annotation file of ``split``; ``value`` is ``data.<split>``, a file or a folder that holds one.

    Raises:
        DataError: there is none, or there are several to choose from.
    """
    if split == "all" and value is None:
        return _only_json([root / "annotations", root])
    words = FOLDERS_OF[split]
    usual = [f"annotations/instances_{word}{year}.json" for word in words for year in ("", "2017")]
    exported = ("{}/_annotations.coco.json", "annotations/{}.json", "{}.json", "{}/annotations.json")
    usual += [name.format(word) for name in exported for word in words]
    file = first_existing(
        [root / name for name in usual] if value is None else [root / value],
        what=f"annotation file of the {split} split",
        key=f"data.{split}",
        remedy=", or a share of all pictures with data.split (0.2)" if value is None else "",
    )
    return _only_json([file]) if os.path.isdir(file) else file


def _only_json(folders: Sequence[Path]) -> Path:
    """The JSON file in the first of ``folders`` that holds any."""
    for folder in folders:
        found = sorted(folder.glob("*.json"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise DataError(f"data.train: {folder} holds {len(found)} JSON files ({names}); name one of them")
    raise DataError(f"data.train: no JSON file in {', '.join(map(str, folders))}; name the annotation file")


def read_content(
    content: Mapping[str, Any], *, folder: Path, file: Path, names: Sequence[str] | None = None
) -> Annotations:
    """The loaded content of annotation file ``file``, its pictures in ``folder``.

    Raises:
        DataError: as :meth:`Coco.read` says.

    """
    return _assembled(checked(content, file), folder=folder, file=file, names=names)


def _assembled(content: CocoContent, *, folder: Path, file: Path, names: Sequence[str] | None) -> Annotations:
    numbers, notes = _category_numbers(content.categories, file=file)
    class_names, category_ids = _classes(content.categories, numbers, names=names, file=file)
    label_of_number = {number: label for label, number in enumerate(category_ids)}
    labels = {given: label_of_number[number] for given, number in numbers.items()}
    need_unique((image.id for image in content.images), where=str(file), what="ids of images")
    by_image = _group(content, file=file, labels=labels)
    pictures = [_picture(image, by_image[image.id], folder, labels) for image in content.images]
    return assemble(pictures, class_names=class_names, category_ids=category_ids, notes=notes)


def _category_numbers(categories: Sequence[CocoCategory], *, file: Path) -> tuple[dict[Any, int], list[str]]:
    """A whole number for each id of a category, as the COCO evaluation needs it, and a note where an id was none."""
    need_unique((category.id for category in categories), where=str(file), what="ids of categories")
    given = [category.id for category in categories]
    if all(_is_whole(value) for value in given):
        return {value: int(value) for value in given}, []
    texts = ", ".join(shown(value) for value in given[:5]) + (", ..." if len(given) > 5 else "")
    try:
        numbers = {value: int(value) for value in given}
    except (ValueError, OverflowError):
        numbers = {}
    if len(set(numbers.values())) == len(given) and all(abs(number) < 2**63 for number in numbers.values()):
        return numbers, [f"ids of categories that are text ({texts}) are taken as the numbers they spell"]
    return (
        {value: number for number, value in enumerate(given, start=1)},
        [f"ids of categories are not all whole numbers ({texts}); they count as 1 to {len(given)} in their order"],
    )


def _is_whole(value: int | float | str) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2**63)


def _classes(
    categories: Sequence[CocoCategory], numbers: Mapping[Any, int], *, names: Sequence[str] | None, file: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and numbers of the classes in label order."""
    ordered = sorted(categories, key=lambda category: numbers[category.id])
    plain = [str(category.id if category.name is None else category.name) for category in ordered]
    unique = [f"{n} ({c.id})" if plain.count(n) > 1 else n for n, c in zip(plain, ordered, strict=True)]
    ids = dict(zip(unique, (numbers[category.id] for category in ordered), strict=True))
    class_names = order_names(unique, names, where=str(file))
    return class_names, tuple(ids[name] for name in class_names)


def _group(content: CocoContent, *, file: Path, labels: Mapping[Any, int]) -> dict[Any, list[CocoAnnotation]]:
    """Annotations by image id, after what each refers to was looked for."""
    faults = Faults()
    for place, image in enumerate(content.images):
        fault = _image_fault(image)
        if fault:
            faults.add(entry_name("images", place, image), fault)
    grouped: dict[Any, list[CocoAnnotation]] = {image.id: [] for image in content.images}
    add_dangling(content.annotations, images=grouped, categories=labels, faults=faults)
    faults.refuse(file)
    for annotation in content.annotations:
        grouped[annotation.image_id].append(annotation)
    return grouped


def _image_fault(image: CocoImage) -> str:
    if isinstance(image.id, float) and not _is_whole(image.id):
        return f"id {shown(image.id)}; expected a whole number or text"
    if any(side is not None and not side.is_integer() for side in (image.width, image.height)):
        return f"width {image.width} and height {image.height}; expected whole numbers of pixels"
    return ""


def _picture(
    image: CocoImage, annotations: Sequence[CocoAnnotation], folder: Path, labels: Mapping[Any, int]
) -> Picture:
    path = folder / image.file_name
    width, height = (image.width, image.height) if image.width and image.height else size_of(path)
    boxes = np.array([a.bbox for a in annotations], dtype=np.float64).reshape(-1, 4)
    areas = [a.area for a in annotations]
    return Picture(
        path=path,
        file_name=image.file_name,
        image_id=int(image.id) if isinstance(image.id, float) else image.id,
        width=int(width),
        height=int(height),
        boxes_xywh=boxes,
        labels=np.array([labels[a.category_id] for a in annotations], dtype=np.int64),
        crowd=np.array([bool(a.iscrowd) for a in annotations], dtype=np.bool_),
        area=np.array(
            [box[2] * box[3] if area is None else area for area, box in zip(areas, boxes, strict=True)],
            dtype=np.float64,
        ),
    )


def _picture_folder(root: Path, images: str | None, file: Path, entries: Sequence[CocoImage]) -> Path:
    if images is not None:
        return first_existing([root / images], what="picture folder", key="data.images")
    part = file.stem.removeprefix("instances_")
    places = [root / "images", root / part, root / "images" / part, root, file.parent, file.parent / "images"]
    names = [entry.file_name for entry in entries]
    if not names:
        return places[0]
    # The first place that holds any: single pictures may be missing, and are named later, all at once.
    holding = next((place for name in names for place in places if os.path.isfile(place / name)), None)
    if holding is None:
        tried = ", ".join(str(place / names[0]) for place in places)
        raise DataError(f"data.images: no folder holds the pictures of {file}; looked for {tried}; set data.images")
    return holding
