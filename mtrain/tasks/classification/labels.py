"""Pictures with one class each: the result of classification data sets and the input of the rest of that task."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError


class Contents(Protocol):
    """The encoded pictures of a split, such as files of a folder or rows of a table. Reading one changes nothing else,
    so that forked processes can read at the same time."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Return the content of one picture file.

        Raises:
            OSError: it cannot be read.
            DataError: there is no picture in its place.
        """
        ...

    def chosen(self, indices: Sequence[int]) -> "Contents":
        """Return the pictures with these numbers, in that order."""
        ...


class Pictures(Protocol):
    """The decoded pictures of a split: an array (N, H, W, 3), or pictures that are decoded when they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LabelledPictures:
    """The pictures of one split with their classes."""

    pictures: Pictures
    """Each (H, W, 3) RGB."""
    labels: NDArray[np.int64]
    """(N,) class index, 0 .. number of classes - 1."""
    class_names: tuple[str, ...]
    origins: Sequence[str]
    """Source of each picture, a description or its file, for messages and captions."""
    keys: Sequence[str] = ()
    """Name of each picture within the data set, the same on every host; ``data.split`` divides by it."""
    notes: Sequence[str] = ()
    """Sentences about parts of the data set that were left out."""

    def __len__(self) -> int:
        return len(self.labels)

    def histogram(self) -> dict[str, int]:
        """Count the pictures per class, in label order; classes without pictures are included."""
        counts = np.bincount(self.labels, minlength=len(self.class_names))
        return {name: int(count) for name, count in zip(self.class_names, counts, strict=True)}

    def report(self) -> list[str]:
        """Return the notes, and one sentence if some classes have no picture."""
        empty = [name for name, count in self.histogram().items() if not count]
        named = f"{', '.join(empty[:20])}{f' and {len(empty) - 20} more' if len(empty) > 20 else ''}"
        return [*self.notes, *([f"classes without a picture: {named}"] if empty else [])]


def divided(split: LabelledPictures, share: float, *, seed: int) -> tuple[LabelledPictures, LabelledPictures]:
    """Divide a split into a training part and an evaluation part with ``share`` of the pictures of each class.

    A class of two or more pictures has at least one in each part, a single picture is for training. A hash of ``seed``
    and its key decides a picture's part, so the parts are the same on every host and for any order of the pictures, and
    most pictures keep their part when others are added.

    Raises:
        DataError: no class has two pictures.
    """
    for_evaluation = sorted(
        index for class_ in _by_class(split, seed) for index in class_[: _count(len(class_), share)]
    )
    if not for_evaluation:
        raise DataError(
            f"data.split: {len(split)} pictures cannot be divided, because no class has two; give more, or leave it out"
        )
    rest = sorted(set(range(len(split))) - set(for_evaluation))
    return _chosen(split, rest), replace(_chosen(split, for_evaluation), notes=())


def _by_class(split: LabelledPictures, seed: int) -> Iterator[list[int]]:
    """Yield the indices of each class, in the order of the hashes of their keys."""
    keys = split.keys or split.origins
    classes: dict[int, list[int]] = {}
    for index, label in enumerate(split.labels.tolist()):
        classes.setdefault(label, []).append(index)
    for indices in classes.values():
        yield sorted(indices, key=lambda index: hashlib.sha256(f"{seed}\0{keys[index]}".encode()).digest())


def _count(pictures: int, share: float) -> int:
    return min(max(round(share * pictures), 1), pictures - 1)


def _chosen(split: LabelledPictures, indices: Sequence[int]) -> LabelledPictures:
    pictures = split.pictures
    return replace(
        split,
        pictures=pictures[np.array(indices)] if isinstance(pictures, np.ndarray) else pictures.chosen(indices),  # type: ignore[attr-defined]
        labels=split.labels[np.array(indices, dtype=np.int64)],
        origins=[split.origins[index] for index in indices],
        keys=[split.keys[index] for index in indices] if split.keys else (),
    )
