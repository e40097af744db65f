"""Convert a detection data set to another format: COCO JSON, Pascal VOC XML or YOLO text files.

COCO holds everything; VOC has no areas and marks crowds ``difficult``; YOLO has neither."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import yaml
from lxml import etree

from mtrain.data.reading import listed
from mtrain.errors import DataError
from mtrain.spec.yaml_reader import dump
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations

Format: TypeAlias = Literal["coco", "voc", "yolo"]
Placing: TypeAlias = Literal["link", "copy"]
IMAGES: Mapping[Format, str] = {"coco": "images", "voc": "JPEGImages", "yolo": "images/{split}"}
"""Folder of the images in each format."""


@dataclass(frozen=True, slots=True)
class _NewImage:
    """An image and its name in the new data set."""

    image: AnnotatedImage
    name: PurePosixPath
    """Path relative to the folder of the images; unique even without its suffix."""


def check_kind(kind: str, name: str) -> None:
    """Refuse data of a kind that has no boxes; ``name`` is its format.

    Raises:
        DataError: the data is not for detection.
    """
    if kind != "detection":
        raise DataError(f"data.format: {name} is for {kind}; only detection data is converted")


def convert(splits: Mapping[str, Annotations], folder: Path, form: Format, *, images: Placing) -> list[str]:
    """Write ``splits`` to the new or empty ``folder``; return sentences about what the format cannot hold.

    Images are hard-linked where that is possible (``link``), else copied.

    Raises:
        DataError: the folder is not empty or cannot be written, or an image is missing.
    """
    missing = [str(p.path) for split in splits.values() for p in split.images if not p.path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} images are missing; correct data.images, or leave them out with "
            f"-o data.skip_missing=true:\n{listed(missing)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: is there and not empty; name a new folder")
    write = _WRITERS[form]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used_names: set[PurePosixPath] = set()
        for name, annotations in splits.items():
            # YOLO's images lie in a folder for each split; those of
            # the other formats share one, where names must not meet.
            if form == "yolo":
                used_names = set()
            # ``images`` holds what the files say, and ``samples`` what training makes of it:
            # a conversion keeps boxes that leave their image, have no area or are repeated.
            placed = [_NewImage(image, _free_name(image, used_names)) for image in annotations.images]
            for item in placed:
                _place(item, folder / IMAGES[form].format(split=name), images)
            write(folder, name, annotations, placed)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}: {error.filename})") from error
    return _losses(splits, form)


def _free_name(image: AnnotatedImage, used_names: set[PurePosixPath]) -> PurePosixPath:
    """Return the image's own file name, with a number if another image's differs only in folder or suffix."""
    own = PurePosixPath(image.path.name)
    name, number = own, 1
    # Without the suffix, because a label file is named by the stem: a.jpg and a.png would share one.
    while name.with_suffix("") in used_names:
        number += 1
        name = own.with_stem(f"{own.stem}-{number}")
    used_names.add(name.with_suffix(""))
    return name


def _place(item: _NewImage, folder: Path, how: Placing) -> None:
    target = folder / item.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if how == "link":
        try:
            os.link(item.image.path.resolve(), target)
        except OSError:  # the folder is on another file system, or on one without links
            pass
        else:
            return
    shutil.copyfile(item.image.path, target)


def _write_coco(folder: Path, split: str, annotations: Annotations, placed: Sequence[_NewImage]) -> None:
    numbers = {item.image.image_id: number for number, item in enumerate(placed, start=1)}
    # COCO's format has whole numbers as ids; images whose ids are texts get new ones.
    keeps_ids = all(isinstance(item.image.image_id, int) for item in placed)
    content = dict(annotations.ground_truth)
    for image, item in zip(content["images"], placed, strict=True):
        image["file_name"] = str(item.name)
        image["id"] = image["id"] if keeps_ids else numbers[image["id"]]
    for annotation in content["annotations"]:
        annotation["image_id"] = annotation["image_id"] if keeps_ids else numbers[annotation["image_id"]]
    target = folder / "annotations" / f"instances_{split}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(content), encoding="utf-8")


def _write_voc(folder: Path, split: str, annotations: Annotations, placed: Sequence[_NewImage]) -> None:
    for item in placed:
        root = etree.Element("annotation")
        _add(root, "folder", IMAGES["voc"])
        _add(root, "filename", str(item.name))
        size = etree.SubElement(root, "size")
        for tag, pixels in (("width", item.image.width), ("height", item.image.height), ("depth", 3)):
            _add(size, tag, pixels)
        for label, box, crowd in _rows(item.image):
            element = etree.SubElement(root, "object")
            _add(element, "name", annotations.class_names[label])
            _add(element, "difficult", int(crowd))
            corners = etree.SubElement(element, "bndbox")
            x, y, width, height = box
            for tag, value in (("xmin", x), ("ymin", y), ("xmax", x + width), ("ymax", y + height)):
                _add(corners, tag, _number(value))
        target = folder / "Annotations" / f"{item.name.stem}.xml"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(etree.tostring(root, pretty_print=True, encoding="utf-8"))
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / f"{split}.txt").write_text("".join(f"{item.name.stem}\n" for item in placed), encoding="utf-8")


def _write_yolo(folder: Path, split: str, annotations: Annotations, placed: Sequence[_NewImage]) -> None:
    labels = folder / "labels" / split
    labels.mkdir(parents=True, exist_ok=True)
    for item in placed:
        side = (item.image.width, item.image.height) * 2
        lines = []
        for label, (x, y, width, height), _ in _rows(item.image):
            values = [v / s for v, s in zip((x + width / 2, y + height / 2, width, height), side, strict=True)]
            lines.append(" ".join([str(label), *map(_number, values)]))
        (labels / f"{item.name.stem}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    file = folder / "data.yaml"
    content: dict[str, Any] = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}
    # Both splits stand in one file, so what the first one has written is kept.
    content = {**content, split: f"images/{split}", "names": dict(enumerate(annotations.class_names))}
    file.write_text(dump(content), encoding="utf-8")


_Writer: TypeAlias = Callable[[Path, str, Annotations, Sequence[_NewImage]], None]
_WRITERS: Mapping[Format, _Writer] = {"coco": _write_coco, "voc": _write_voc, "yolo": _write_yolo}


def _rows(image: AnnotatedImage) -> list[tuple[int, list[float], bool]]:
    return list(zip(image.labels.tolist(), image.boxes_xywh.tolist(), image.crowd.tolist(), strict=True))


def _add(parent: etree._Element, tag: str, value: object) -> None:
    etree.SubElement(parent, tag).text = str(value)


def _number(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _losses(splits: Mapping[str, Annotations], form: Format) -> list[str]:
    images = [image for annotations in splits.values() for image in annotations.images]
    crowds = sum(int(image.crowd.sum()) for image in images)
    areas = sum(int((image.area != image.boxes_xywh[:, 2:].prod(axis=1)).sum()) for image in images)
    lines = []
    if crowds and form == "voc":
        lines.append(f"{crowds} crowd boxes are marked difficult; read them with data.options.use_difficult=false")
    if crowds and form == "yolo":
        lines.append(f"{crowds} crowd boxes have become ordinary ones: the format has no crowds")
    if areas and form != "coco":
        lines.append(f"{areas} areas that are not width x height are lost: the format has no areas")
    return lines
