"""Loss scaling for training in float16."""

from mtrain.core.interfaces import Precision


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) with powers of two, so that it costs no precision.

    Inactive unless ``precision`` is fp16: its scale is 1 then.
    """

    START = 2.0**16
    GROWTH_UPDATES = 2000
    LARGEST = 2.0**24

    def __init__(self, precision: Precision) -> None:
        self.active = precision == "fp16"
        self.scale = self.START if self.active else 1.0
        self.age = 0
        """Good updates since the scale last changed."""

    def good(self) -> None:
        """After an update that was applied: the scale doubles after 2,000 in a row."""
        if not self.active:
            return
        self.age += 1
        if self.age >= self.GROWTH_UPDATES:
            self.scale, self.age = min(self.scale * 2, self.LARGEST), 0

    def bad(self) -> None:
        """After a gradient that was not finite: the scale is halved."""
        if self.active:
            self.scale, self.age = max(self.scale / 2, 1.0), 0
