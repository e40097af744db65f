"""Mixed precision: which type the forward pass takes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import paddle

from mtrain.core.interfaces import Precision
from mtrain.errors import SpecError

HALF: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}


def check(precision: Precision) -> None:
    """Refuse what this GPU cannot do and Paddle would pass over with a warning; `paddle_limits` knows the rest.

    Raises:
        SpecError: bf16 on a GPU that has none.
    """
    if precision == "bf16" and not paddle.amp.is_bfloat16_supported():
        raise SpecError("train.precision: bf16 was given, but this GPU has no bfloat16; use fp16 or fp32")


def forward_context(precision: Precision) -> AbstractContextManager[Any]:
    """Surrounds a forward pass: autocast for bf16 and fp16, nothing otherwise. Weights stay float32."""
    if precision not in HALF:
        return nullcontext()
    return paddle.amp.auto_cast(level="O1", dtype=HALF[precision])


def backward_context(precision: Precision) -> AbstractContextManager[Any]:
    """Surrounds a backward pass, which must not be under autocast."""
    return paddle.amp.auto_cast(enable=False) if precision in HALF else nullcontext()
