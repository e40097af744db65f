"""The interface between a task and what predicts on images in memory, one at a time, such as ``mtrain serve``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtrain.core.interfaces.tensors import Array


@dataclass(frozen=True, slots=True)
class Found:
    """The findings in one image."""

    rows: Sequence[Mapping[str, Any]]
    """One row of plain values for each object or class, the highest score first: ``class``, ``label`` (its number, from
    0), ``score``, and further keys of the task."""
    mask: Array | None = None
    """The class of each pixel, uint8 (H, W), where the task finds one."""


class LiveImages(Protocol):
    """Turns images into samples of a model, and its predictions into rows. Returned by ``TaskKind.live``.

    The members are pure functions, which several threads may call at once.
    """

    def sample(self, image: Array) -> dict[str, Array]:
        """Return the arrays of one sample, by their names in the batches of the task, without the batch's axis.

        They equal those with which the task evaluates, bit for bit.

        Args:
            image: uint8 (H, W, 3) RGB, as displayed.
        """
        ...

    def found(
        self, prediction: Any, sample: Mapping[str, Array], *, size_wh: tuple[int, int], confidence: float
    ) -> Found:
        """Read what was found from a prediction.

        Args:
            prediction: One of the values that ``Model.predictions`` returns for the task.
            sample: The sample that was predicted on; its image may be left out.
            size_wh: Width and height of the image in pixels.
            confidence: Lowest score that is kept.
        """
        ...

    def drawn(self, image: Array, found: Found, *, confidence: float) -> Array:
        """Return a copy of the image, uint8 (H, W, 3) RGB, with what was found in it."""
        ...
