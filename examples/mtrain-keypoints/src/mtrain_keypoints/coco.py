"""The data set plugin `coco_keypoints`: annotations in the form of COCO's keypoint challenge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import override

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.reading import first_existing, listed, need_root, order_names
from mtrain.errors import DataError
from mtrain.spec.files import read_bytes
from mtrain_keypoints.people import People

MAX_BYTES = 4 << 30
"""Largest annotation file that is read, in bytes."""


class _Image(BaseModel):
    id: int
    file_name: str = Field(min_length=1)


class _Category(BaseModel):
    id: int
    name: str
    keypoints: list[str] = []


class _Annotation(BaseModel):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float] = (0, 0, 0, 0)
    keypoints: list[float] = []
    iscrowd: int = 0


class _File(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


class CocoKeypoints(Dataset):
    """Metrics of one category with the points of each.

    `data.train` and `data.val` name JSON files below `data.root`; without them `annotations/person_keypoints_train2017.json`
    or `train.json` is looked for, and the same for `val`. Images lie in `data.images`, or in `train2017`, `train` or
    `images`. Points are named and ordered as the category says; `data.names` may order them differently.
    """

    class Options(BaseModel):
        """The keys of `data.options`."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        category: str | None = Field(default=None, description="name of the category; null: the only one with points")
        min_points: int = Field(default=1, ge=1, description="people with fewer known points are left out")

    kind: ClassVar[str] = "keypoints"

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def read(self, request: SplitRequest) -> People:
        root = need_root(request.root, "coco_keypoints")
        name = "train" if request.split == "all" else request.split
        stated = [request.value] if request.value else [f"annotations/person_keypoints_{name}2017.json", f"{name}.json"]
        path = first_existing([root / each for each in stated], what="annotation file", key=f"data.{name}")
        folders = [request.images] if request.images else [f"{name}2017", name, "images"]
        folder = first_existing([root / each for each in folders], what="folder of images", key="data.images")
        content = _read(path)
        category = self._category(content, path)
        point_names = order_names(category.keypoints, request.names, where=str(path))
        order = [category.keypoints.index(each) for each in point_names]
        files = {image.id: image.file_name for image in content.images}
        rows = [row for row in content.annotations if row.category_id == category.id and not row.iscrowd]
        points = _points(rows, len(order), path)[:, order]
        kept = np.flatnonzero(points[..., 2].sum(axis=1) >= self.options.min_points)
        wrong = [f"image {rows[row].image_id}" for row in kept if rows[row].image_id not in files]
        wrong += [f"a box of {rows[row].bbox[2:]} pixels" for row in kept if min(rows[row].bbox[2:]) <= 0]
        if wrong:
            raise DataError(f"{path}: annotations of images that are not listed, or without a box:\n{listed(wrong)}")
        keys = [files[rows[row].image_id] for row in kept]
        return People(
            images=[folder / key for key in keys],
            boxes=np.array([rows[row].bbox for row in kept]).reshape(-1, 4),
            points=points[kept],
            class_names=point_names,
            keys=keys,
        )

    def _category(self, content: _File, path: Path) -> _Category:
        wanted = self.options.category
        found = {each.name: each for each in content.categories if each.keypoints}
        if wanted in found:
            return found[wanted]
        if wanted is None and len(found) == 1:
            return next(iter(found.values()))
        asked = "null" if wanted is None else repr(wanted)
        raise DataError(
            f"data.options.category: {asked} given; {path} has points for {', '.join(found) or 'no category'}"
        )


def _read(path: Path) -> _File:
    try:
        return TypeAdapter(_File).validate_json(read_bytes(path, limit=MAX_BYTES))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: no annotations of keypoints: {place}{': ' if place else ''}{first['msg']}") from error


def _points(rows: Sequence[_Annotation], count: int, path: Path) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return x, y and whether each point is known, (N, K, 3)."""
    for row in rows:
        if len(row.keypoints) != 3 * count:
            raise DataError(
                f"{path}: a person of image {row.image_id} has {len(row.keypoints)} numbers; expected {3 * count}, three "
                f"for each of {count} points"
            )
    points = np.array([row.keypoints for row in rows], dtype=np.float64).reshape(-1, count, 3)
    points[..., 2] = points[..., 2] > 0
    return points
