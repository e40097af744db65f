"""Mixed precision: which type the forward pass takes, and loss scaling for fp16."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mtrain.core.interfaces import Precision

HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_context(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Surrounds a forward pass: autocast for bf16 and fp16, nothing otherwise."""
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


@contextmanager
def backward_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Surrounds a backward pass, which must not be under autocast."""
    if precision not in HALF:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


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
