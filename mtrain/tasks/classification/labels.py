"""Pictures with one class each: the result of classification data sets and the input of the rest of that task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LabelledPictures:
    """One split, held in memory: for sets of small pictures."""

    pictures: NDArray[np.uint8]
    """(N, H, W, 3) RGB."""
    labels: NDArray[np.int64]
    """(N,) class index, 0 .. number of classes - 1."""
    class_names: tuple[str, ...]
    origins: Sequence[str]
    """Source of each picture, a description or its file, for messages and captions."""

    def __len__(self) -> int:
        return len(self.labels)

    def histogram(self) -> dict[str, int]:
        """Count the pictures per class, in label order; classes without pictures are included."""
        counts = np.bincount(self.labels, minlength=len(self.class_names))
        return {name: int(count) for name, count in zip(self.class_names, counts, strict=True)}

    def report(self) -> list[str]:
        """Return one sentence if some classes have no picture."""
        empty = [name for name, count in self.histogram().items() if not count]
        return [f"classes without a picture: {', '.join(empty)}"] if empty else []
