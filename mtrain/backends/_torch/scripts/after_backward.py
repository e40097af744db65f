"""Average gradients after the backward pass, for jobs whose script decides which model is trained when."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends.engine import NoExchange, have_gradients
from mtrain.core.overriding import override

MESSAGE_ELEMENTS = 8 * 1024 * 1024
"""Gradient elements of a message: 32 MiB in float32."""


class AfterBackward(NoExchange):
    """The ``Exchange`` of a model on which nothing hangs, so that any graph may go through it.

    DDP and Horovod's optimizer send gradients while they are computed, and expect one backward pass through the whole model
    for each forward pass. A discriminator through which the gradient of a generator flows has none.
    """

    def __init__(self, trained: Mapping[str, Tensor], collective: TorchCollective) -> None:
        """Exchange the gradients of the parameters ``trained`` over the ranks of ``collective``."""
        self._parameters = list(trained.values())
        self._collective = collective

    @override
    def finish(self) -> None:
        """Average the gradients over the ranks; every rank must call, for the same model.

        A gradient that only some ranks have is averaged with zeros; one that no rank has stays absent, as in a job of one
        rank.
        """
        flags = have_gradients(self._parameters, self._collective)
        present = [parameter for parameter, flag in zip(self._parameters, flags, strict=True) if flag]
        for message in messages(present):
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in message]
            # Divided before it is sent, as in DDP: this rounds alike.
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self._collective.size)
            mean = self._collective.all_reduce(flat, "sum")
            for parameter, gradient, part in zip(
                message, gradients, mean.split([p.numel() for p in message]), strict=True
            ):
                parameter.grad = gradient.copy_(part.view(gradient.shape))


def messages(parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Divide parameters, in their order, into messages of one dtype and at most ``MESSAGE_ELEMENTS``, or a single larger one."""
    message: list[Tensor] = []
    elements = 0
    for parameter in parameters:
        elements += parameter.numel()
        if message and (elements > MESSAGE_ELEMENTS or message[0].dtype != parameter.dtype):
            yield message
            message, elements = [], parameter.numel()
        message.append(parameter)
    if message:
        yield message
