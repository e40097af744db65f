"""Windows around people as samples for the loader, each a pure function of (seed, epoch, index)."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain_keypoints.people import People, mirrored
from mtrain_keypoints.section import KeypointAugmentSpec, KeypointDataSpec

Matrix = NDArray[np.float64]
GREY = (114, 114, 114)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What travels beside the image, which lies in shared memory."""

    index: int
    points: NDArray[np.float32]
    """(K, 2) in sides of the input, 0..1 inside."""
    known: NDArray[np.float32]
    """(K,) 1 where the point is known and inside the input, else 0."""
    back: NDArray[np.float64]
    """(2, 3) affine map from sides of the input to pixels of the image."""


class KeypointSource:
    """One split as samples, augmented if `augment` is set. Implements `Source` of `mtrain.core.interfaces`."""

    def __init__(
        self, split: People, section: KeypointDataSpec, *, augment: KeypointAugmentSpec | None = None, seed: int = 0
    ) -> None:
        self._split, self._section, self._augment, self._seed = split, section, augment, seed
        self._swaps = mirrored(split.class_names)
        side = section.image_size
        self.array = ArraySpec("images", (side, side, 3))

    def __len__(self) -> int:
        return len(self._split)

    def describe(self, index: int) -> str:
        """Return the person's image, for messages."""
        return self._split.name(index)

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        """Return the shape (S, S, 3), which is always the same."""
        return self.array.shape

    def fill(self, epoch: int, index: int, out: Array, *, update: int = 0) -> Sample:
        """Write the window of a person to `out`, uint8 (S, S, 3) RGB, and return the rest of the sample.

        Raises:
            DataError: the image cannot be read.
        """
        side = self._section.image_size
        forth, flipped = self._window(epoch, index)
        pixels = forth * side
        pixels[:, 2] -= 0.5  # OpenCV counts from the centre of the first pixel
        pixels[:, 2] += pixels[:, :2] @ (0.5, 0.5)
        image = self._split.image(index)
        cv2.warpAffine(image, pixels, (side, side), dst=out, flags=cv2.INTER_LINEAR, borderValue=GREY)
        points = self._split.points[index]
        if flipped:
            points = points[self._swaps]
        places = points[:, :2] @ forth[:, :2].T + forth[:, 2]
        known = (points[:, 2] > 0) & (places >= 0).all(axis=1) & (places < 1).all(axis=1)
        return Sample(
            index,
            places.astype(np.float32),
            known.astype(np.float32),
            np.asarray(cv2.invertAffineTransform(forth), np.float64),
        )

    def _window(self, epoch: int, index: int) -> tuple[Matrix, bool]:
        """Return the map (2, 3) from pixels of the image to sides of the input, and whether it is mirrored."""
        left, top, width, height = self._split.boxes[index]
        sides = np.array([width, height]) * self._section.padding
        if self._section.resize == "letterbox":
            sides[:] = sides.max()
        middle, angle, flipped = np.array([left + width / 2, top + height / 2]), 0.0, False
        if self._augment is not None:
            augment, rng = self._augment, np.random.default_rng([self._seed, epoch, index])
            turn, zoom, across, down = rng.uniform(-1, 1, 4)
            angle = np.deg2rad(turn * augment.degrees)
            sides = sides * (1 + zoom * augment.scale)
            middle = middle + np.array([across, down]) * augment.translate * sides
            flipped = bool(rng.random() < augment.flip_lr)
        rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        linear = rotation / sides[:, None] * (np.array([[-1.0], [1.0]]) if flipped else 1.0)
        return np.concatenate([linear, (0.5 - linear @ middle)[:, None]], axis=1), flipped

    def collate(self, samples: Sequence[Sample]) -> dict[str, Array]:
        """Join samples: `index` int64 (B,), `points` float32 (B, K, 2), `known` float32 (B, K), `back` float64 (B, 2, 3)."""
        return {
            "index": np.array([sample.index for sample in samples], dtype=np.int64),
            "points": np.stack([sample.points for sample in samples]),
            "known": np.stack([sample.known for sample in samples]),
            "back": np.stack([sample.back for sample in samples]),
        }
