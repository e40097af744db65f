"""Annotations in COCO JSON form (https://cocodataset.org/#format-data), boxes only: ``segmentation`` is not read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from mtrain.core.errors import DataError
from mtrain.data.reading import FOLDERS_OF, Split, first_existing, listed, need_root, need_unique, order_names, size_of
from mtrain.data.sample import Annotations, Picture, assemble

_NO_BOXES: tuple[Mapping[str, Any], ...] = ()


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
        content = load_json(file)
        folder = _picture_folder(root, images, file, content["images"])
        return read_content(content, folder=folder, file=file, names=names)


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
    return _only_json([file]) if file.is_dir() else file


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


def load_json(file: Path) -> dict[str, Any]:
    """A COCO annotation file with its three lists present.

    Raises:
        DataError: it cannot be read, is no JSON, or a list is missing.

    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected a COCO annotation file") from error
    except ValueError as error:
        raise DataError(f"{file}: no valid JSON ({error}); is the file complete?") from error
    lacking = [
        key
        for key in ("images", "annotations", "categories")
        if not isinstance(content, dict) or not isinstance(content.get(key), list)
    ]
    if lacking:
        raise DataError(
            f"{file}: no list {', '.join(lacking)}; a COCO annotation file has images, annotations and categories"
        )
    return dict(content)


def read_content(
    content: Mapping[str, Any], *, folder: Path, file: Path, names: Sequence[str] | None = None
) -> Annotations:
    """The loaded content of annotation file ``file``, its pictures in ``folder``.

    Raises:
        DataError: as :meth:`Coco.read` says.

    """
    class_names, category_ids = _categories(content["categories"], names=names, file=file)
    need_unique((image.get("id") for image in content["images"]), where=str(file), what="ids of images")
    by_image = _group(content, file=file, categories=set(category_ids))
    labels = {category: label for label, category in enumerate(category_ids)}
    pictures = [_picture(image, by_image.get(image["id"], _NO_BOXES), folder, labels) for image in content["images"]]
    return assemble(pictures, class_names=class_names, category_ids=category_ids)


def _categories(
    categories: Sequence[Mapping[str, Any]], *, names: Sequence[str] | None, file: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if any("id" not in category for category in categories):
        raise DataError(f"{file}: a category has no id; every category needs id and name")
    need_unique((category["id"] for category in categories), where=str(file), what="ids of categories")
    ordered = sorted(categories, key=lambda category: int(category["id"]))
    plain = [str(category.get("name", category["id"])) for category in ordered]
    unique = [f"{n} ({c['id']})" if plain.count(n) > 1 else n for n, c in zip(plain, ordered, strict=True)]
    ids = dict(zip(unique, (int(category["id"]) for category in ordered), strict=True))
    class_names = order_names(unique, names, where=str(file))
    return class_names, tuple(ids[name] for name in class_names)


def _group(content: Mapping[str, Any], *, file: Path, categories: set[int]) -> dict[Any, list[Mapping[str, Any]]]:
    """Annotations by image id, after all of them were checked."""
    known = {image["id"] for image in content["images"] if "id" in image}
    wrong = [f"an image has no file_name: {image}" for image in content["images"] if "file_name" not in image]
    grouped: dict[Any, list[Mapping[str, Any]]] = {}
    for annotation in content["annotations"]:
        fault = _fault(annotation, known, categories)
        if fault:
            wrong.append(f"annotation {annotation.get('id', '?')}: {fault}")
        else:
            grouped.setdefault(annotation["image_id"], []).append(annotation)
    if wrong:
        raise DataError(f"{file}: {len(wrong)} wrong entries; correct or remove them:\n{listed(wrong)}")
    return grouped


def _fault(annotation: Mapping[str, Any], images: set[Any], categories: set[int]) -> str:
    if annotation.get("image_id") not in images:
        return f"image_id {annotation.get('image_id')!r} is not among the images"
    if annotation.get("category_id") not in categories:
        return f"category_id {annotation.get('category_id')!r} is not among the categories"
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        return f"bbox {box!r}, expected [x, y, width, height] in pixels"
    try:
        finite = all(abs(float(value)) < 1e9 for value in box)
    except (TypeError, ValueError):
        finite = False
    return "" if finite else f"bbox {box!r}, expected four finite numbers"


def _picture(
    image: Mapping[str, Any], annotations: Sequence[Mapping[str, Any]], folder: Path, labels: Mapping[int, int]
) -> Picture:
    path = folder / image["file_name"]
    width, height = (image["width"], image["height"]) if image.get("width") and image.get("height") else size_of(path)
    boxes = np.array([a["bbox"] for a in annotations], dtype=np.float64).reshape(-1, 4)
    areas = [a.get("area") for a in annotations]
    return Picture(
        path=path,
        file_name=image["file_name"],
        image_id=image["id"],
        width=int(width),
        height=int(height),
        boxes_xywh=boxes,
        labels=np.array([labels[a["category_id"]] for a in annotations], dtype=np.int64),
        crowd=np.array([bool(a.get("iscrowd", 0)) for a in annotations], dtype=np.bool_),
        area=np.array(
            [box[2] * box[3] if area is None else area for area, box in zip(areas, boxes, strict=True)],
            dtype=np.float64,
        ),
    )


def _picture_folder(root: Path, images: str | None, file: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    if images is not None:
        return first_existing([root / images], what="picture folder", key="data.images")
    part = file.stem.removeprefix("instances_")
    places = [root / "images", root / part, root / "images" / part, root, file.parent, file.parent / "images"]
    names = [entry["file_name"] for entry in entries if "file_name" in entry]
    if not names:
        return places[0]
    # The first place that holds any: single pictures may be missing, and are named later, all at once.
    holding = next((place for name in names for place in places if (place / name).is_file()), None)
    if holding is None:
        tried = ", ".join(str(place / names[0]) for place in places)
        raise DataError(f"data.images: no folder holds the pictures of {file}; looked for {tried}; set data.images")
    return holding
