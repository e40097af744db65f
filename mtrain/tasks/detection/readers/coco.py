"""Read annotations in COCO JSON form (https://cocodataset.org/#format-data), boxes only; ``segmentation`` is
ignored."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtrain.core.interfaces import Dataset, Split, SplitRequest
from mtrain.data.once_per_host import once_per_host
from mtrain.data.reading import FOLDERS_OF, first_existing, need_root, need_unique, order_names, size_of
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import SHARED, AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.readers.coco_json import (
    CocoAnnotation,
    CocoCategory,
    CocoContent,
    CocoImage,
    Faults,
    add_dangling,
    check_content,
    entry_name,
    read_coco_json,
    show_value,
)

ROBOFLOW = "_annotations.coco.json"
"""Name of the annotation file in each folder of Roboflow's export."""


class Coco(Dataset):
    """The ``coco`` data set plugin.

    ``data.train`` and ``data.val`` name annotation files; by default ``annotations/instances_<split>.json``, the same
    with ``2017``, or ``<split>/_annotations.coco.json``. ``data.images`` names the image folder; by default
    ``images``, ``<split>2017``, ``images/<split>2017``, the root or the folder of the annotation file: the first of
    them that holds an image of the file.
    """

    kind: ClassVar[str] = "detection"

    @once_per_host(SHARED)
    def read(self, request: SplitRequest) -> Annotations:
        """Read one split.

        Raises:
            DataError: files are missing, the JSON is damaged, ids clash, annotations name an unknown image or
                category, or ``names`` disagrees with the categories. All mistakes of one kind are listed.

        """
        root = need_root(request.root, "coco")
        file = annotation_file(root, request.value, request.split)
        content = read_coco_json(file)
        folder = _image_folder(root, request.images, file, content.images)
        return _assemble(content, folder=folder, file=file, names=request.names)


def annotation_file(root: Path, value: str | None, split: Split) -> Path:
    """Return the annotation file of ``split``; ``value`` is ``data.<split>``, a file or a folder that holds one.

    Raises:
        DataError: there is none, or there are several to choose from.
    """
    if split == "all" and value is None:
        return _whole_set(root)
    usual = _usual_files(split)
    file = first_existing(
        [root / name for name in usual] if value is None else [root / value],
        what=f"annotation file of the {split} split",
        key=f"data.{split}",
        remedy=", or a share of all images with data.split (0.2)" if value is None else "",
    )
    return _only_json([file]) if os.path.isdir(file) else file


def _usual_files(split: Split) -> list[str]:
    """Return where tools leave the annotation file of ``split``, from the root, the usual place first."""
    split_names = FOLDERS_OF[split]
    usual = [f"annotations/instances_{split_name}{year}.json" for split_name in split_names for year in ("", "2017")]
    export_patterns = (f"{{}}/{ROBOFLOW}", "annotations/{}.json", "{}.json", "{}/annotations.json")
    return usual + [name.format(split_name) for name in export_patterns for split_name in split_names]


def _whole_set(root: Path) -> Path:
    """Return the annotation file of all images: the only one, or that of a training split without an evaluation split.

    Raises:
        DataError: there is none, or there are several to choose from.
    """
    trained, scored = (next((root / name for name in _usual_files(split) if (root / name).is_file()), None)
                       for split in ("train", "val"))  # fmt: skip
    if trained is not None and scored is not None:
        raise DataError(
            f"data.split: takes the evaluation split from all images, but {root} has one, {scored}; leave data.split out, "
            f"or name the file to divide: data.train={trained.relative_to(root)}"
        )
    if trained is not None:
        return trained
    return _only_json([root / "annotations", root])


def _only_json(folders: Sequence[Path]) -> Path:
    """Return the JSON file in the first of ``folders`` that holds any; Roboflow's, where it lies beside others."""
    for folder in folders:
        json_files = sorted(folder.glob("*.json"))
        if len(json_files) == 1:
            return json_files[0]
        if folder / ROBOFLOW in json_files:
            return folder / ROBOFLOW
        if json_files:
            names = ", ".join(path.name for path in json_files)
            raise DataError(f"data.train: {folder} holds {len(json_files)} JSON files ({names}); name one of them")
    raise DataError(f"data.train: no JSON file in {', '.join(map(str, folders))}; name the annotation file")


def read_content(
    content: Mapping[str, Any], *, folder: Path, file: Path, names: Sequence[str] | None = None
) -> Annotations:
    """Return the annotations in the loaded ``content`` of annotation file ``file``, with the images in ``folder``.

    Raises:
        DataError: as :meth:`Coco.read` says.

    """
    return _assemble(check_content(content, file), folder=folder, file=file, names=names)


def _assemble(content: CocoContent, *, folder: Path, file: Path, names: Sequence[str] | None) -> Annotations:
    numbers, notes = _category_numbers(content.categories, file=file)
    class_names, category_ids = _classes(content.categories, numbers, names=names, file=file)
    label_of_number = {number: label for label, number in enumerate(category_ids)}
    labels = {category_id: label_of_number[number] for category_id, number in numbers.items()}
    need_unique((image.id for image in content.images), where=str(file), what="ids of images")
    by_image = _group(content, file=file, labels=labels)
    images = [_image(image, by_image[image.id], folder, labels) for image in content.images]
    return assemble(images, class_names=class_names, category_ids=category_ids, notes=notes)


def _category_numbers(categories: Sequence[CocoCategory], *, file: Path) -> tuple[dict[Any, int], list[str]]:
    """Return a whole number for each category id, as the COCO evaluation requires, and a note if an id was none."""
    need_unique((category.id for category in categories), where=str(file), what="ids of categories")
    ids = [category.id for category in categories]
    # COCO's evaluation takes numbers alone; exporters write "1", 1.0, or a name.
    if all(_is_whole(value) for value in ids):
        return {value: int(value) for value in ids}, []
    texts = ", ".join(show_value(value) for value in ids[:5]) + (", ..." if len(ids) > 5 else "")
    try:
        numbers = {value: int(value) for value in ids}
    except (ValueError, OverflowError):
        numbers = {}
    if len(set(numbers.values())) == len(ids) and all(abs(number) < 2**63 for number in numbers.values()):
        return numbers, [f"ids of categories that are text ({texts}) are taken as the numbers they spell"]
    return (
        {value: number for number, value in enumerate(ids, start=1)},
        [f"ids of categories are not all whole numbers ({texts}); they count as 1 to {len(ids)} in their order"],
    )


def _is_whole(value: int | float | str) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2**63)


def _classes(
    categories: Sequence[CocoCategory], numbers: Mapping[Any, int], *, names: Sequence[str] | None, file: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and numbers of the classes in label order."""
    ordered = sorted(categories, key=lambda category: numbers[category.id])
    raw_names = [str(category.id if category.name is None else category.name) for category in ordered]
    # Two categories of one name stay two classes, which are told apart by their ids.
    unique_names = [f"{n} ({c.id})" if raw_names.count(n) > 1 else n for n, c in zip(raw_names, ordered, strict=True)]
    ids = dict(zip(unique_names, (numbers[category.id] for category in ordered), strict=True))
    class_names = order_names(unique_names, names, where=str(file))
    return class_names, tuple(ids[name] for name in class_names)


def _group(content: CocoContent, *, file: Path, labels: Mapping[Any, int]) -> dict[Any, list[CocoAnnotation]]:
    """Group annotations by image id, after checking that every reference exists."""
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
        return f"id {show_value(image.id)}; expected a whole number or text"
    if any(side is not None and not side.is_integer() for side in (image.width, image.height)):
        return f"width {image.width} and height {image.height}; expected whole numbers of pixels"
    return ""


def _image(
    image: CocoImage, annotations: Sequence[CocoAnnotation], folder: Path, labels: Mapping[Any, int]
) -> AnnotatedImage:
    path = folder / image.file_name
    # Some exporters leave the sizes out, or write 0: then the image file tells.
    width, height = (image.width, image.height) if image.width and image.height else size_of(path)
    boxes = np.array([a.bbox for a in annotations], dtype=np.float64).reshape(-1, 4)
    areas = [a.area for a in annotations]
    return AnnotatedImage(
        path=path,
        file_name=image.file_name,
        image_id=int(image.id) if isinstance(image.id, float) else image.id,
        width=int(width),
        height=int(height),
        boxes_xywh=boxes,
        labels=np.array([labels[a.category_id] for a in annotations], dtype=np.int64),
        crowd=np.array([bool(a.iscrowd) for a in annotations], dtype=np.bool_),
        area=np.array(
            # An area of its own is that of the outline, by which COCO calls an object small or large.
            [box[2] * box[3] if area is None else area for area, box in zip(areas, boxes, strict=True)],
            dtype=np.float64,
        ),
    )


def _image_folder(root: Path, images: str | None, file: Path, entries: Sequence[CocoImage]) -> Path:
    if images is not None:
        return first_existing([root / images], what="image folder", key="data.images")
    split_name = file.stem.removeprefix("instances_")
    candidates = [
        root / "images",
        root / split_name,
        root / "images" / split_name,
        root,
        file.parent,
        file.parent / "images",
    ]
    names = [entry.file_name for entry in entries]
    if not names:
        return candidates[0]
    # Accept the first folder that holds any image: missing ones are reported later, all at once.
    folder = next((candidate for name in names for candidate in candidates if os.path.isfile(candidate / name)), None)
    if folder is None:
        paths = ", ".join(str(candidate / names[0]) for candidate in candidates)
        raise DataError(f"data.images: no folder holds the images of {file}; looked for {paths}; set data.images")
    return folder
