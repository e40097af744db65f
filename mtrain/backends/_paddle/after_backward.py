"""Average gradients after the backward pass, for jobs whose script decides which model is trained when."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import paddle
from paddle import Tensor

from mtrain.backends._paddle.collective import PaddleCollective


class AfterBackward:
    """The ``Exchange`` of a model on which nothing hangs, see that of torch."""

    def __init__(self, trained: Sequence[Tensor], collective: PaddleCollective) -> None:
        """Exchange the gradients of the parameters ``trained`` over the ranks of ``collective``."""
        self._parameters = trained
        self._collective = collective

    def during(self, *, last: bool) -> nullcontext[None]:
        """Do nothing around a micro batch."""
        return nullcontext()

    def finish(self) -> None:
        """Average the gradients over the ranks; every rank must call, for the same model.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent.
        """
        own_flags = np.array([float(p.grad is not None) for p in self._parameters], np.float32)
        flags = self._collective.all_reduce(own_flags, "max").tolist()
        present = [parameter for parameter, flag in zip(self._parameters, flags, strict=True) if flag]
        for dtype in dict.fromkeys(parameter.dtype for parameter in present):
            message = [parameter for parameter in present if parameter.dtype == dtype]
            gradients = [p.grad if p.grad is not None else paddle.zeros_like(p) for p in message]
            flat = paddle.concat([gradient.reshape([-1]) for gradient in gradients]) / self._collective.size
            mean = self._collective.all_reduce(flat, "sum")
            for parameter, part in zip(message, mean.split([p.size for p in message]), strict=True):
                parameter.grad = part.reshape(parameter.shape)
