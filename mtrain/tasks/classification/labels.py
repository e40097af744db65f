"""Images with one class each: the result of classification data sets and the input of the rest of that task."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.data.classes import LEFT_OUT, ClassChoice
from mtrain.data.reading import divide
from mtrain.data.texts import Texts
from mtrain.errors import DataError, first_few


class Images(Protocol):
    """The decoded images of a split: an array (N, H, W, 3), or images that are decoded when they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LabelledImages:
    """The images of one split with their classes."""

    images: Images
    """Each (H, W, 3) RGB."""
    labels: NDArray[np.int64]
    """(N,) class index, 0 .. number of classes - 1."""
    class_names: tuple[str, ...]
    origins: Sequence[str]
    """Source of each image, a description or its file, for messages and captions."""
    keys: Sequence[str] = ()
    """Name of each image within the data set, the same on every host; ``data.split`` divides by it."""
    notes: Sequence[str] = ()
    """Sentences about parts of the data set that were left out."""

    def __len__(self) -> int:
        return len(self.labels)

    def histogram(self) -> dict[str, int]:
        """Count the images per class, in label order; classes without images are included."""
        counts = np.bincount(self.labels, minlength=len(self.class_names))
        return {name: int(count) for name, count in zip(self.class_names, counts, strict=True)}

    def report(self) -> list[str]:
        """Return the notes, and one sentence if some classes have no image."""
        empty = [name for name, count in self.histogram().items() if not count]
        return [*self.notes, *([f"classes without an image: {first_few(empty, 20)}"] if empty else [])]

    def with_classes(self, choice: ClassChoice) -> "LabelledImages":
        """Return the images of some classes, under their new names."""
        counts = np.bincount(self.labels, minlength=len(choice.known)).tolist()
        labels = choice.label_of[self.labels]
        kept = np.flatnonzero(labels != LEFT_OUT)
        notes = [*self.notes, choice.describe(counts, unit="images")]
        chosen = self if len(kept) == len(self) else _choose(self, kept.tolist())
        return replace(chosen, labels=labels[kept], class_names=choice.names, notes=notes)

    def divide(self, share: float, *, seed: int) -> "tuple[LabelledImages, LabelledImages]":
        """Divide the split into a training part and an evaluation part with ``share`` of the images of each class.

        A class of two or more images has at least one in each part, a single image is for training. The parts are the same
        on every host and for any order of the images.

        Raises:
            DataError: no class has two images.
        """
        classes: dict[int, list[int]] = {}
        for index, label in enumerate(self.labels.tolist()):
            classes.setdefault(label, []).append(index)
        keys = self.keys or self.origins
        parts: tuple[list[int], list[int]] = ([], [])
        for indices in classes.values():
            for part, places in zip(parts, divide([keys[index] for index in indices], share, seed=seed), strict=True):
                part += [indices[place] for place in places]
        train, evaluation = map(sorted, parts)
        if not evaluation:
            raise DataError(
                f"data.split: {len(self)} images cannot be divided, because no class has two; give more, or leave it out"
            )
        # The notes are about the whole set: with both parts they would be reported twice.
        return _choose(self, train), replace(_choose(self, evaluation), notes=())


def _choose(split: LabelledImages, indices: Sequence[int]) -> LabelledImages:
    images = split.images
    return replace(
        split,
        images=images[np.array(indices)] if isinstance(images, np.ndarray) else images.choose(indices),  # type: ignore[attr-defined]
        labels=split.labels[np.array(indices, dtype=np.int64)],
        origins=Texts.of(split.origins[index] for index in indices),
        keys=Texts.of(split.keys[index] for index in indices) if split.keys else (),
    )
