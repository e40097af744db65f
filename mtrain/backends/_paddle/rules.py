"""Update rules with the mathematics of torch.optim, computed in the order and dtype in which torch computes them.

paddle.optimizer is not used: its kernels hold momentum, betas and epsilon as float32 even if the weights are float64,
and on the CPU its Adam takes three times as long as the single operations below. Every rule keeps its moments under
neutral names.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import paddle
from paddle import Tensor

from mtrain.backends._paddle import internals
from mtrain.backends._paddle.flat import Flat, join
from mtrain.backends._paddle.internals import add_
from mtrain.core.overriding import override
from mtrain.core.update.recipe import MOMENTS
from mtrain.errors import SpecError


class GradientPiece:
    """The gradients of consecutive parameters of a group, ``first`` up to ``end`` (excluded), as one vector."""

    def __init__(self, first: int, grads: Sequence[Tensor]) -> None:
        self.first = first
        self.end = first + len(grads)
        self.grad = join(grads)


def pieces(grads: Sequence[Tensor | None]) -> list[GradientPiece]:
    """Copy the gradients of a group into pieces; parameters without a gradient are in no piece."""
    copied: list[GradientPiece] = []
    run: list[Tensor] = []
    for i, grad in enumerate([*grads, None]):
        if grad is not None:
            run.append(grad)
        elif run:
            copied.append(GradientPiece(i - len(run), run))
            run = []
    return copied


class Rule(Protocol):
    """An update rule for the parameters of one group."""

    moments: dict[str, Flat]

    def apply(self, grad_pieces: Sequence[GradientPiece], *, learning_rate: float, momentum: float | None) -> None:
        """Update the parameters of ``grad_pieces``, overwriting the gradients; ``momentum`` overrides the group's."""
        ...

    def set_updates(self, updates: int) -> None:
        """Set how many updates were made before, when a job resumes."""
        ...


class _Composed(ABC):
    """A ``Rule`` whose step is computed piece by piece."""

    default: ClassVar[tuple[str, float]] = "beta1", 0.9
    """Name of the option that ``momentum`` overrides, and its value where a group has none."""

    def __init__(self, parameters: Flat, options: Mapping[str, float], names: Sequence[str]) -> None:
        """Start the moments ``names`` of ``parameters`` at zero."""
        self._parameters = parameters
        self._options = options
        self._decay = options.get("weight_decay", 0.0)
        # torch's SGD starts without a velocity and sets it to the gradient; from zeros the first step gives the same,
        # 0 * momentum + grad.
        self.moments = {name: parameters.zeros() for name in names}
        self._updates = 0

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._updates = updates

    def apply(self, grad_pieces: Sequence[GradientPiece], *, learning_rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._updates += 1
        momentum = self._options.get(*self.default) if momentum is None else momentum
        for piece in grad_pieces:
            flats = (self._parameters, *self.moments.values())
            x, *moments = (flat.span(piece.first, piece.end) for flat in flats)
            self._step(piece, x, moments, learning_rate, momentum)

    @abstractmethod
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        """Update the weights ``x`` of a piece and its moments, which are in the order of ``core.update.recipe.MOMENTS``."""


class Sgd(_Composed):
    """``torch.optim.SGD`` without dampening (Sutskever et al. 2013 for nesterov)."""

    default = "momentum", 0.0

    @override
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        (velocity,), grad = moments, piece.grad
        nesterov = bool(self._options.get("nesterov", 0.0))
        # The kernel holds momentum and decay as float32. For float32 weights that loses nothing, and takes one pass
        # over memory instead of five.
        if x.dtype == paddle.float32:
            settings = {"learning_rate": learning_rate, "momentum": momentum, "decay": self._decay}
            internals.momentum_(x, velocity, grad, **settings, nesterov=nesterov)
            return
        if self._decay:
            add_(grad, self._decay, x)
        velocity.scale_(momentum)
        add_(velocity, 1.0, grad)
        if nesterov:
            add_(grad, momentum, velocity)
        add_(x, -learning_rate, grad if nesterov else velocity)


class Adam(_Composed):
    """``torch.optim.Adam`` (Kingma and Ba 2015), or ``AdamW`` with ``decoupled`` decay (Loshchilov and Hutter 2019)."""

    def __init__(self, *given: Any, decoupled: bool) -> None:
        super().__init__(*given)
        self._decoupled = decoupled

    @override
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        (mean, square), grad = moments, piece.grad
        beta2 = self._options.get("beta2", 0.999)
        step = learning_rate / (1 - momentum**self._updates)
        correction = math.sqrt(1 - beta2**self._updates)
        if self._decay and self._decoupled:
            x.scale_(1 - learning_rate * self._decay)
        elif self._decay:
            add_(grad, self._decay, x)
        _follow_(mean, grad, momentum)
        _follow_(square, grad.square(), beta2)
        root = square.sqrt().scale_(1 / correction) + self._options.get("eps", 1e-8)
        add_(x, -step, mean.divide(root))


class Lion(_Composed):
    """Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2. Steps are signs of a mixture of mean and gradient."""

    @override
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        (mean,) = moments
        step = paddle.sign(mean * momentum + piece.grad * (1 - momentum))
        if self._decay:
            x.scale_(1 - learning_rate * self._decay)
        add_(x, -learning_rate, step)
        _follow_(mean, piece.grad, self._options.get("beta2", 0.99))


class RmsProp(_Composed):
    """``torch.optim.RMSprop``, not centred: Tieleman and Hinton 2012, lecture 6.5; with momentum as Graves 2013 adds it."""

    default = "momentum", 0.0

    @override
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        square, velocity = moments
        if self._decay:
            add_(piece.grad, self._decay, x)
        _follow_(square, piece.grad.square(), self._options.get("beta2", 0.99))
        velocity.scale_(momentum)
        add_(velocity, 1.0, piece.grad.divide(_shift(square.sqrt(), self._options.get("eps", 1e-8))))
        add_(x, -learning_rate, velocity)


class Lamb(_Composed):
    """LAMB: You et al. 2020 (arXiv 1904.00962), algorithm 2, with the identity as its function phi.

    Adam's step of each array, decay included, gets the length of the array; without either length it stays as it is.
    """

    @override
    def _step(
        self, piece: GradientPiece, x: Tensor, moments: list[Tensor], learning_rate: float, momentum: float
    ) -> None:
        mean, square = moments
        beta2 = self._options.get("beta2", 0.999)
        _follow_(mean, piece.grad, momentum)
        _follow_(square, piece.grad.square(), beta2)
        root = _shift((square * (1 / (1 - beta2**self._updates))).sqrt(), self._options.get("eps", 1e-6))
        steps = (mean * (1 / (1 - momentum**self._updates))).divide(root)
        if self._decay:
            steps = steps + x * self._decay
        start = 0
        for place in range(piece.first, piece.end):
            array = self._parameters.span(place, place + 1)
            step = internals.view(steps, start, start + array.size)
            start += array.size
            lengths = internals.length(array), internals.length(step)
            ratio = lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0
            add_(array, -learning_rate * ratio, step)


def _follow_(average: Tensor, value: Tensor, share: float) -> None:
    """Compute ``share * average + (1 - share) * value`` in place."""
    average.scale_(share)
    add_(average, 1 - share, value)


def _shift(x: Tensor, by: float) -> Tensor:
    # A number added to a tensor is rounded to float32 first.
    return x + paddle.full([1], by, x.dtype)


KINDS: Mapping[str, Callable[..., Rule]] = {
    "sgd": Sgd,
    "adam": partial(Adam, decoupled=False),
    "adamw": partial(Adam, decoupled=True),
    "lion": Lion,
    "rmsprop": RmsProp,
    "lamb": Lamb,
}
"""Maps ``Recipe.rule`` to its class."""


def make(rule: str, parameters: Flat, options: Mapping[str, float]) -> Rule:
    """Make the update rule of one group: one of ``KINDS``.

    Raises:
        SpecError: it is none of these.
    """
    if rule not in KINDS:
        raise SpecError(
            f"optimizer.rule: {rule} given with Paddle; use a backend on torch, or one of {', '.join(KINDS)}"
        )
    return KINDS[rule](parameters, options, MOMENTS[rule])
