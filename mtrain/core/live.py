"""The interface between a task and what predicts on pictures in memory, one at a time, such as ``mtrain serve``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:  # numpy takes 0.1 s to import, and reading a spec needs these names only
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = Any


@dataclass(frozen=True, slots=True)
class Found:
    """The findings in one picture."""

    rows: Sequence[Mapping[str, Any]]
    """One row of plain values for each object or class, the highest score first: ``class``, ``label`` (its number, from
    0), ``score``, and further keys of the task."""
    mask: Array | None = None
    """The class of each pixel, uint8 (H, W), where the task finds one."""


class LivePictures(Protocol):
    """Turns pictures into samples of a model, and its predictions into rows. Returned by ``TaskKind.live``.

    The members are pure functions, which several threads may call at once.
    """

    def sample(self, picture: Array) -> dict[str, Array]:
        """Return the arrays of one sample, by their names in the batches of the task, without the batch's axis.

        They equal those with which the task evaluates, bit for bit.

        Args:
            picture: uint8 (H, W, 3) RGB, as displayed.
        """
        ...

    def found(
        self, prediction: Any, sample: Mapping[str, Array], *, size_wh: tuple[int, int], confidence: float
    ) -> Found:
        """Read what was found from a prediction.

        Args:
            prediction: One of the values that ``Model.predictions`` returns for the task.
            sample: The sample that was predicted on; its picture may be left out.
            size_wh: Width and height of the picture in pixels.
            confidence: Lowest score that is kept.
        """
        ...

    def drawn(self, picture: Array, found: Found, *, confidence: float) -> Array:
        """Return a copy of the picture, uint8 (H, W, 3) RGB, with what was found in it."""
        ...
