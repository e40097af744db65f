"""Mixed precision: the contexts in which forward and backward passes run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import paddle

from mtrain.core.interfaces import Precision
from mtrain.errors import SpecError

HALF: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}


def check(precision: Precision) -> None:
    """Refuse a precision that this GPU lacks and Paddle would ignore with a warning; `paddle_limits` refuses the rest.

    Raises:
        SpecError: The precision is bf16 on a GPU without bfloat16.
    """
    if precision == "bf16" and not paddle.amp.is_bfloat16_supported():
        raise SpecError("train.precision: bf16 was given, but this GPU has no bfloat16; use fp16 or fp32")


def forward_context(precision: Precision) -> AbstractContextManager[Any]:
    """Return the context of a forward pass: autocast for bf16 and fp16, else an empty one. Weights stay float32."""
    if precision not in HALF:
        return nullcontext()
    return paddle.amp.auto_cast(level="O1", dtype=HALF[precision])


def backward_context(precision: Precision) -> AbstractContextManager[Any]:
    """Return the context of a backward pass, in which autocast is off."""
    return paddle.amp.auto_cast(enable=False) if precision in HALF else nullcontext()


@contextmanager
def inference_context(precision: Precision, device: str) -> Iterator[None]:
    """Return the context of a forward pass without gradients."""
    with paddle.no_grad(), forward_context(precision):
        yield
