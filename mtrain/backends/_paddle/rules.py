"""Update rules with the mathematics of torch.optim, computed in the order and dtype in which torch computes them.

paddle.optimizer is not used: its kernels hold momentum, betas and epsilon as float32 even if the weights are float64,
and on the CPU its Adam takes three times as long as the single operations below. Every rule keeps its moments under
neutral names.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import paddle
from paddle import Tensor

from mtrain.backends._paddle import internals
from mtrain.backends._paddle.flat import Flat, join
from mtrain.backends._paddle.internals import add_


class Piece:
    """The gradients of consecutive parameters of a group, ``first`` up to ``end`` (excluded), as one vector."""

    def __init__(self, first: int, grads: Sequence[Tensor]) -> None:
        self.first = first
        self.end = first + len(grads)
        self.grad = join(grads)


def pieces(grads: Sequence[Tensor | None]) -> list[Piece]:
    """Copy the gradients of a group into pieces; parameters without a gradient are in no piece."""
    copied: list[Piece] = []
    run: list[Tensor] = []
    for i, grad in enumerate([*grads, None]):
        if grad is not None:
            run.append(grad)
        elif run:
            copied.append(Piece(i - len(run), run))
            run = []
    return copied


class Rule(Protocol):
    """An update rule for the parameters of one group."""

    moments: dict[str, Flat]

    def apply(self, grad_pieces: Sequence[Piece], *, rate: float, momentum: float | None) -> None:
        """Update the parameters of ``grad_pieces``, overwriting the gradients; ``momentum`` overrides the group's."""
        ...

    def set_updates(self, updates: int) -> None:
        """Set how many updates were made before, when a job resumes."""
        ...


class Sgd:
    """``torch.optim.SGD`` without dampening (Sutskever et al. 2013 for nesterov)."""

    def __init__(self, parameters: Flat, options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._momentum = options.get("momentum", 0.0)
        self._decay = options.get("weight_decay", 0.0)
        self._nesterov = bool(options.get("nesterov", 0.0))
        # torch starts without a buffer and sets it to the gradient; from zeros the first step gives the same,
        # 0 * momentum + grad.
        self._velocity = parameters.zeros()
        self.moments = {"momentum": self._velocity}

    def apply(self, grad_pieces: Sequence[Piece], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        momentum = self._momentum if momentum is None else momentum
        for piece in grad_pieces:
            x = self._parameters.span(piece.first, piece.end)
            velocity = self._velocity.span(piece.first, piece.end)
            # The kernel holds momentum and decay as float32. For float32 weights that loses nothing, and takes one pass
            # over memory instead of five.
            if x.dtype == paddle.float32:
                self._fused(x, velocity, piece.grad, rate, momentum)
            else:
                self._composed(x, velocity, piece.grad, rate, momentum)

    def _fused(self, x: Tensor, velocity: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        internals.momentum_(x, velocity, grad, rate=rate, momentum=momentum, decay=self._decay, nesterov=self._nesterov)

    def _composed(self, x: Tensor, velocity: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        if self._decay:
            add_(grad, self._decay, x)
        velocity.scale_(momentum)
        add_(velocity, 1.0, grad)
        if self._nesterov:
            add_(grad, momentum, velocity)
        add_(x, -rate, grad if self._nesterov else velocity)

    def set_updates(self, updates: int) -> None:
        """Do nothing: SGD does not depend on the number of updates."""


class Adam:
    """``torch.optim.Adam`` (Kingma and Ba 2015), or ``AdamW`` with ``decoupled`` decay (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: Flat, options: Mapping[str, float], *, decoupled: bool) -> None:
        self._parameters = parameters
        self._options = options
        self._decoupled = decoupled
        self._mean, self._square = parameters.zeros(), parameters.zeros()
        self.moments = {"mean": self._mean, "square": self._square}
        self._updates = 0

    def apply(self, grad_pieces: Sequence[Piece], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._updates += 1
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        beta2 = self._options.get("beta2", 0.999)
        step = rate / (1 - beta1**self._updates)
        correction = math.sqrt(1 - beta2**self._updates)
        decay = self._options.get("weight_decay", 0.0)
        for piece in grad_pieces:
            grad = piece.grad
            x, mean, square = (
                flat.span(piece.first, piece.end) for flat in (self._parameters, self._mean, self._square)
            )
            if decay and self._decoupled:
                x.scale_(1 - rate * decay)
            elif decay:
                add_(grad, decay, x)
            mean.scale_(beta1)
            add_(mean, 1 - beta1, grad)
            square.scale_(beta2)
            add_(square, 1 - beta2, grad.square())
            root = square.sqrt().scale_(1 / correction) + self._options.get("eps", 1e-8)
            add_(x, -step, mean.divide(root))

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._updates = updates


def make(rule: str, parameters: Flat, options: Mapping[str, float]) -> Rule:
    """Make the update rule of one group: ``sgd``, ``adam`` or ``adamw``."""
    if rule == "sgd":
        return Sgd(parameters, options)
    return Adam(parameters, options, decoupled=rule == "adamw")
