"""Loss scaling for training in float16."""

from mtrain.core.interfaces import Precision


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) with powers of two, so that no precision is lost.

    Unless ``precision`` is fp16 it is inactive, and its scale is 1.
    """

    START = 2.0**16
    GROWTH_UPDATES = 2000
    LARGEST = 2.0**24

    def __init__(self, precision: Precision) -> None:
        self.active = precision == "fp16"
        self.scale = self.START if self.active else 1.0
        self.age = 0
        """Number of applied updates since the scale last changed."""

    def good(self) -> None:
        """Count an update that was applied. After ``GROWTH_UPDATES`` in a row the scale doubles."""
        if not self.active:
            return
        self.age += 1
        if self.age >= self.GROWTH_UPDATES:
            self.scale, self.age = min(self.scale * 2, self.LARGEST), 0

    def bad(self) -> None:
        """Halve the scale, after a gradient that was not finite."""
        if self.active:
            self.scale, self.age = max(self.scale / 2, 1.0), 0
