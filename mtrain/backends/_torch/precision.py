"""Mixed precision: the contexts in which forward and backward passes run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mtrain.core.interfaces import Precision

HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def forward_context(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: autocast for bf16 and fp16, an empty one otherwise."""
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


@contextmanager
def backward_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Return the context of a backward pass, in which autocast is off."""
    if precision not in HALF:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def inference_context(precision: Precision, device: torch.device) -> Iterator[None]:
    """Return the context of a forward pass without gradients."""
    with torch.no_grad(), forward_context(precision, device):
        yield
