"""The data set plugin `stick_figures`: people with a head and two hands, drawn from a seed, to try the task."""

from typing import ClassVar

import cv2
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.errors import DataError
from mtrain_keypoints.people import People

NAMES = ("head", "left_hand", "right_hand")
SIDE = 64


class StickFigures(Dataset):
    """Draws its images; nothing is downloaded or written."""

    class Options(BaseModel):
        """The keys of `data.options`."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        train: int = Field(default=64, ge=1, description="people to train on")
        val: int = Field(default=16, ge=1, description="people to score")

    kind: ClassVar[str] = "keypoints"
    made_on_first_use: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def read(self, request: SplitRequest) -> People:
        if request.root is not None or request.value is not None or request.images is not None:
            raise DataError("data: a path is given, but stick_figures draws its images; leave it out")
        count = {"train": self.options.train, "val": self.options.val}.get(
            request.split, self.options.train + self.options.val
        )
        rng = np.random.default_rng([count, {"train": 1, "val": 2}.get(request.split, 3)])
        pixels = np.full((count, SIDE, SIDE, 3), 230, np.uint8)
        points = np.ones((count, len(NAMES), 3))
        for image, places in zip(pixels, points, strict=True):
            places[:, :2] = _draw(image, rng)
        low, high = points[..., :2].min(axis=1) - 4, points[..., :2].max(axis=1) + 4
        return People(
            images=pixels,
            boxes=np.concatenate([low, high - low], axis=1),
            points=points,
            class_names=NAMES,
            keys=[f"{request.split} {number}" for number in range(count)],
        )


def _draw(image: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", rng: np.random.Generator) -> np.ndarray:
    """Draw one person into the image; return its points (3, 2)."""
    chest = rng.uniform(26, 38, 2)
    # The hand of a person who looks at us: the left one is on the right side of the image.
    low, high = np.array([[-2, -13], [8, -8], [-16, -8]]), np.array([[2, -9], [16, 12], [-8, 12]])
    head, left, right = chest + rng.uniform(low, high)
    for end in (head, left, right, chest + np.array([0, 16])):
        cv2.line(image, _pixel(chest), _pixel(end), (60, 60, 60), 2)
    cv2.circle(image, _pixel(head), 4, (200, 150, 110), -1)
    for hand in (left, right):
        cv2.circle(image, _pixel(hand), 2, (200, 60, 60), -1)
    return np.array([head, left, right])


def _pixel(point: np.ndarray) -> tuple[int, int]:
    return round(float(point[0])), round(float(point[1]))
