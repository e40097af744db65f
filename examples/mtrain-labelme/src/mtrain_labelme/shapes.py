"""The content of a LabelMe file: shapes that a person has drawn on an image, and the boxes around them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.errors import DataError
from mtrain.spec.files import read_bytes

MAX_BYTES = 256 << 20
"""Largest file that is read, in bytes: LabelMe can store the image in it."""
_Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]


class Shape(BaseModel):
    """One shape. Keys that are not used here, such as `mask` and `description`, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    label: str = Field(min_length=1)
    points: list[tuple[_Number, _Number]] = Field(min_length=1)
    """Pixels from the left and from the top."""
    shape_type: str = "polygon"
    group_id: int | None = None
    """Shapes of one label with the same number are parts of one object."""
    flags: dict[str, bool] = {}

    def corners(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of the box around the shape."""
        points = np.array(self.points)
        if self.shape_type == "circle" and len(points) == 2:
            radius = math.dist(*self.points)
            points = np.array([points[0] - radius, points[0] + radius])
        (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
        return float(left), float(top), float(right), float(bottom)

    def area(self) -> float:
        """Return the area of the shape in square pixels."""
        left, top, right, bottom = self.corners()
        if self.shape_type == "circle":
            return math.pi * ((right - left) / 2) ** 2
        if self.shape_type != "polygon":
            return (right - left) * (bottom - top)
        x, y = np.array(self.points).T
        return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)


class LabelMeFile(BaseModel):
    """One file: an image and its shapes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    image_path: str = Field(alias="imagePath", min_length=1)
    image_width: int | None = Field(None, alias="imageWidth", gt=0)
    image_height: int | None = Field(None, alias="imageHeight", gt=0)
    shapes: list[Shape]


def read_file(path: Path) -> LabelMeFile:
    """Read a LabelMe file.

    Raises:
        DataError: it cannot be read, or is none; the message has one line.
    """
    try:
        return LabelMeFile.model_validate_json(read_bytes(path, limit=MAX_BYTES))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: no file of LabelMe: {place}{': ' if place else ''}{first['msg']}") from error


def objects_of(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Return the shapes of each object, in the order of their first shapes."""
    groups: dict[tuple[str, int], list[Shape]] = {}
    objects: list[list[Shape]] = []
    for shape in shapes:
        parts = [] if shape.group_id is None else groups.setdefault((shape.label, shape.group_id), [])
        if not parts:
            objects.append(parts)
        parts.append(shape)
    return objects


def box_of(parts: Sequence[Shape]) -> NDArray[np.float64]:
    """Return left, top, width and height of the box around all parts of an object."""
    corners = np.array([part.corners() for part in parts])
    left_top, right_bottom = corners[:, :2].min(axis=0), corners[:, 2:].max(axis=0)
    return np.concatenate([left_top, right_bottom - left_top])
