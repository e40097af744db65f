"""Update rules with the mathematics of torch.optim, computed in the order and dtype in which torch computes them.

paddle.optimizer is not used: its kernels hold momentum, betas and epsilon as float32 even if the weights are float64,
and on the CPU its Adam takes three times as long as the single operations below. Every rule keeps its moments under
neutral names.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
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

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        momentum = self._momentum if momentum is None else momentum
        for piece in grad_pieces:
            x = self._parameters.span(piece.first, piece.end)
            velocity = self._velocity.span(piece.first, piece.end)
            # The kernel holds momentum and decay as float32. For float32 weights that loses nothing, and takes one pass
            # over memory instead of five.
            if x.dtype == paddle.float32:
                self._apply_fused(x, velocity, piece.grad, learning_rate, momentum)
            else:
                self._compose(x, velocity, piece.grad, learning_rate, momentum)

    def _apply_fused(self, x: Tensor, velocity: Tensor, grad: Tensor, learning_rate: float, momentum: float) -> None:
        internals.momentum_(
            x,
            velocity,
            grad,
            learning_rate=learning_rate,
            momentum=momentum,
            decay=self._decay,
            nesterov=self._nesterov,
        )

    def _compose(self, x: Tensor, velocity: Tensor, grad: Tensor, learning_rate: float, momentum: float) -> None:
        if self._decay:
            add_(grad, self._decay, x)
        velocity.scale_(momentum)
        add_(velocity, 1.0, grad)
        if self._nesterov:
            add_(grad, momentum, velocity)
        add_(x, -learning_rate, grad if self._nesterov else velocity)

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

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._updates += 1
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        beta2 = self._options.get("beta2", 0.999)
        step = learning_rate / (1 - beta1**self._updates)
        correction = math.sqrt(1 - beta2**self._updates)
        decay = self._options.get("weight_decay", 0.0)
        for piece in grad_pieces:
            grad = piece.grad
            x, mean, square = (
                flat.span(piece.first, piece.end) for flat in (self._parameters, self._mean, self._square)
            )
            if decay and self._decoupled:
                x.scale_(1 - learning_rate * decay)
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


class Lion:
    """Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2. Steps are signs of a mixture of mean and gradient."""

    def __init__(self, parameters: Flat, options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        self._mean = parameters.zeros()
        self.moments = {"mean": self._mean}

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        beta2, decay = self._options.get("beta2", 0.99), self._options.get("weight_decay", 0.0)
        for piece in grad_pieces:
            x, mean = (flat.span(piece.first, piece.end) for flat in (self._parameters, self._mean))
            step = paddle.sign(mean * beta1 + piece.grad * (1 - beta1))
            if decay:
                x.scale_(1 - learning_rate * decay)
            add_(x, -learning_rate, step)
            _follow_(mean, piece.grad, beta2)

    def set_updates(self, updates: int) -> None:
        """Do nothing: Lion does not depend on the number of updates."""


class RmsProp:
    """``torch.optim.RMSprop``, not centred: Tieleman and Hinton 2012, lecture 6.5; with momentum as Graves 2013 adds it."""

    def __init__(self, parameters: Flat, options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        self._square, self._velocity = parameters.zeros(), parameters.zeros()
        self.moments = {"square": self._square, "momentum": self._velocity}

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        momentum = self._options.get("momentum", 0.0) if momentum is None else momentum
        for piece in grad_pieces:
            x, square, velocity = (
                flat.span(piece.first, piece.end) for flat in (self._parameters, self._square, self._velocity)
            )
            if decay := self._options.get("weight_decay", 0.0):
                add_(piece.grad, decay, x)
            _follow_(square, piece.grad.square(), self._options.get("beta2", 0.99))
            velocity.scale_(momentum)
            add_(velocity, 1.0, piece.grad.divide(_shift(square.sqrt(), self._options.get("eps", 1e-8))))
            add_(x, -learning_rate, velocity)

    def set_updates(self, updates: int) -> None:
        """Do nothing: RMSprop does not depend on the number of updates."""


class Adadelta:
    """``torch.optim.Adadelta``: Zeiler 2012 (arXiv 1212.5701), algorithm 1, whose step is multiplied by the learning rate."""

    def __init__(self, parameters: Flat, options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        self._square, self._step_square = parameters.zeros(), parameters.zeros()
        self.moments = {"square": self._square, "step_square": self._step_square}

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``; ``momentum`` has no meaning here."""
        share, eps = self._options.get("beta2", 0.9), self._options.get("eps", 1e-6)
        for piece in grad_pieces:
            x, square, step_square = (
                flat.span(piece.first, piece.end) for flat in (self._parameters, self._square, self._step_square)
            )
            if decay := self._options.get("weight_decay", 0.0):
                add_(piece.grad, decay, x)
            _follow_(square, piece.grad.square(), share)
            step = _shift(step_square, eps).sqrt().divide(_shift(square, eps).sqrt()) * piece.grad
            _follow_(step_square, step.square(), share)
            add_(x, -learning_rate, step)

    def set_updates(self, updates: int) -> None:
        """Do nothing: Adadelta does not depend on the number of updates."""


class Lamb:
    """LAMB: You et al. 2020 (arXiv 1904.00962), algorithm 2, with the identity as its function phi.

    Adam's step of each array, decay included, gets the length of the array; without either length it stays as it is.
    """

    def __init__(self, parameters: Flat, options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        self._mean, self._square = parameters.zeros(), parameters.zeros()
        self.moments = {"mean": self._mean, "square": self._square}
        self._updates = 0

    def apply(self, grad_pieces: Sequence[Piece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._updates += 1
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        beta2, decay = self._options.get("beta2", 0.999), self._options.get("weight_decay", 0.0)
        for piece in grad_pieces:
            x, mean, square = (
                flat.span(piece.first, piece.end) for flat in (self._parameters, self._mean, self._square)
            )
            _follow_(mean, piece.grad, beta1)
            _follow_(square, piece.grad.square(), beta2)
            root = _shift((square * (1 / (1 - beta2**self._updates))).sqrt(), self._options.get("eps", 1e-6))
            step = (mean * (1 / (1 - beta1**self._updates))).divide(root)
            if decay:
                step = step + x * decay
            self._add(piece, step, learning_rate)

    def _add(self, piece: Piece, steps: Tensor, learning_rate: float) -> None:
        """Add the step of each array, stretched to the array's length."""
        start = 0
        for place in range(piece.first, piece.end):
            x = self._parameters.span(place, place + 1)
            step = internals.view(steps, start, start + x.size)
            start += x.size
            lengths = internals.norm([x]), internals.norm([step])
            add_(x, -learning_rate * (lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0), step)

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._updates = updates


def _follow_(average: Tensor, value: Tensor, share: float) -> None:
    """Compute ``share * average + (1 - share) * value`` in place."""
    average.scale_(share)
    add_(average, 1 - share, value)


def _shift(x: Tensor, by: float) -> Tensor:
    # A number added to a tensor is rounded to float32 first.
    return x + paddle.full([1], by, x.dtype)


KINDS: Mapping[str, Callable[[Flat, Mapping[str, float]], Rule]] = {
    "sgd": Sgd,
    "adam": partial(Adam, decoupled=False),
    "adamw": partial(Adam, decoupled=True),
    "lion": Lion,
    "rmsprop": RmsProp,
    "adadelta": Adadelta,
    "lamb": Lamb,
}
"""Maps ``Recipe.rule`` to its class."""


def make(rule: str, parameters: Flat, options: Mapping[str, float]) -> Rule:
    """Make the update rule of one group: one of ``KINDS``."""
    return KINDS[rule](parameters, options)
