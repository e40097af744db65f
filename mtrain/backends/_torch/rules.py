"""Update rules with the mathematics of torch.optim, on torch's fused kernels.

torch.optim itself is not used: constructing one of its optimizers imports the compiler (1.6 s), and its loop branches
at every step on options that a recipe has fixed. Every rule keeps its moments under neutral names.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mtrain.backends._torch import internals
from mtrain.core.overriding import override
from mtrain.core.update.recipe import MOMENTS


class Rule(Protocol):
    """An update rule for the parameters of one group."""

    moments: dict[str, list[Tensor]]
    """Maps the name of a moment to one tensor per parameter."""

    def leave_out(self, skip: Tensor | None) -> None:
        """Make the next calls of ``apply`` change nothing where ``skip``, a float32 number on the device, is 1."""
        ...

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """Update the parameters at ``places`` of the group with ``grads``; ``momentum`` overrides the group's own."""
        ...

    def set_updates(self, updates: int) -> None:
        """Set how many updates were made before, when a job resumes or an update was left out."""
        ...


Tensors = list[Tensor]
Moments = Mapping[str, Tensors]


class _Whole(ABC):
    """A ``Rule`` on whole arrays."""

    default: ClassVar[tuple[str, float]] = "beta1", 0.9
    """Name of the option that ``momentum`` overrides, and its value where a group has none."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float], names: Sequence[str]) -> None:
        """Start the moments ``names`` of ``parameters`` at zero; the list may get its elements later."""
        self._parameters = parameters
        self._options = options
        # torch's SGD starts without a velocity and sets it to the gradient; from zeros the first step gives the same,
        # 0 * momentum + grad.
        self.moments = {name: [torch.zeros_like(p) for p in parameters] for name in names}
        self._skip: Tensor | None = None

    def leave_out(self, skip: Tensor | None) -> None:
        """See ``Rule.leave_out``."""
        self._skip = skip

    def set_updates(self, updates: int) -> None:
        """Do nothing: most rules do not depend on the number of updates."""
        return

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``."""
        weights = [self._parameters[i] for i in places]
        moments = {name: [tensors[i] for i in places] for name, tensors in self.moments.items()}
        momentum = self._options.get(*self.default) if momentum is None else momentum
        self._step(weights, list(grads), moments, learning_rate, momentum)

    @abstractmethod
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        """Do what ``apply`` does, with the moments of these weights and the momentum that counts."""


class Sgd(_Whole):
    """``torch.optim.SGD`` without dampening (Sutskever et al. 2013 for nesterov)."""

    default = "momentum", 0.0

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        internals.sgd_(
            weights,
            grads,
            moments["momentum"],
            learning_rate=learning_rate,
            momentum=momentum,
            decay=self._options.get("weight_decay", 0.0),
            nesterov=bool(self._options.get("nesterov", 0.0)),
            skip=self._skip,
        )


class Adam(_Whole):
    """``torch.optim.Adam`` (Kingma and Ba 2015), or ``AdamW`` with ``decoupled`` decay (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: Sequence[Tensor], *given: Any, decoupled: bool) -> None:
        super().__init__(parameters, *given)
        self._decoupled = decoupled
        # On the device, where the kernel counts on only if it applies the update.
        self._updates = torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else None)

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        self._updates += 1 if self._skip is None else 1 - self._skip
        internals.adam_(
            weights,
            grads,
            moments["mean"],
            moments["square"],
            self._updates,
            learning_rate=learning_rate,
            betas=(momentum, self._options.get("beta2", 0.999)),
            decay=self._options.get("weight_decay", 0.0),
            eps=self._options.get("eps", 1e-8),
            decoupled=self._decoupled,
            skip=self._skip,
        )

    @override
    def set_updates(self, updates: int) -> None:
        self._updates.fill_(updates)


class _Composed(_Whole):
    """A rule of several kernels, which none of them can leave out: what it changed is put back, on the device.

    Where an update may be left out, weights and moments of the group are copied first.
    """

    @override
    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        if self._skip is None:
            super().apply(places, grads, learning_rate=learning_rate, momentum=momentum)
            return
        held = [tensors[i] for tensors in (self._parameters, *self.moments.values()) for i in places]
        former = internals.copies(held)
        super().apply(places, grads, learning_rate=learning_rate, momentum=momentum)
        internals.copy_if_(held, former, self._skip)


class Lion(_Composed):
    """Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2. Steps are signs of a mixture of mean and gradient."""

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        mixtures = internals.products(moments["mean"], momentum)
        internals.add_scaled_(mixtures, internals.products(grads, 1 - momentum), 1.0)
        steps = internals.signs(mixtures)
        if decay := self._options.get("weight_decay", 0.0):
            internals.scale_(weights, 1 - learning_rate * decay)
        internals.scale_(steps, -learning_rate)
        internals.add_scaled_(weights, steps, 1.0)
        _follow_(moments["mean"], grads, self._options.get("beta2", 0.99))


class RmsProp(_Composed):
    """``torch.optim.RMSprop``, not centred: Tieleman and Hinton 2012, lecture 6.5; with momentum as Graves 2013 adds it."""

    default = "momentum", 0.0

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        squares, velocities = moments["square"], moments["momentum"]
        grads = _with_decay(grads, weights, self._options.get("weight_decay", 0.0))
        _follow_(squares, internals.products(grads, grads), self._options.get("beta2", 0.99))
        roots = internals.roots(squares)
        internals.shift_(roots, self._options.get("eps", 1e-8))
        internals.scale_(velocities, momentum)
        internals.add_scaled_(velocities, internals.quotients(grads, roots), 1.0)
        internals.add_scaled_(weights, internals.products(velocities, -learning_rate), 1.0)


class Lamb(_Composed):
    """LAMB: You et al. 2020 (arXiv 1904.00962), algorithm 2, with the identity as its function phi.

    Adam's step of each array, decay included, gets the length of the array; without either length it stays as it is.
    """

    _updates = 0

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        self._updates += 1
        means, squares = moments["mean"], moments["square"]
        beta2 = self._options.get("beta2", 0.999)
        _follow_(means, grads, momentum)
        _follow_(squares, internals.products(grads, grads), beta2)
        roots = internals.roots(internals.products(squares, 1 / (1 - beta2**self._updates)))
        internals.shift_(roots, self._options.get("eps", 1e-6))
        steps = internals.quotients(internals.products(means, 1 / (1 - momentum**self._updates)), roots)
        if decay := self._options.get("weight_decay", 0.0):
            internals.add_scaled_(steps, internals.products(weights, decay), 1.0)
        lengths = torch.stack(internals.norms(weights)), torch.stack(internals.norms(steps))
        ratios = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], 1.0)
        internals.add_scaled_(weights, internals.products(steps, list((ratios * -learning_rate).unbind())), 1.0)

    @override
    def set_updates(self, updates: int) -> None:
        self._updates = updates


class _Orthogonal(_Composed):
    """Muon of matrices: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), scaled as by Liu et al. 2025 (arXiv 2502.16982).

    By that scale, section 2.2, a step is as long as one of AdamW, so that both train at one learning rate.
    """

    default = "momentum", 0.95

    @override
    def _step(self, weights: Tensors, grads: Tensors, moments: Moments, learning_rate: float, momentum: float) -> None:
        _follow_(moments["mean"], grads, momentum)
        steps = moments["mean"]
        if self._options.get("nesterov", 1.0):
            steps = internals.products(steps, momentum)
            internals.add_scaled_(steps, internals.products(grads, 1 - momentum), 1.0)
        if decay := self._options.get("weight_decay", 0.0):
            internals.scale_(weights, 1 - learning_rate * decay)
        for weight, step in zip(weights, steps, strict=True):
            weight.add_(orthogonalise(step), alpha=-learning_rate * 0.2 * math.sqrt(max(weight.shape)))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return nearly the orthogonal matrix that is nearest to a matrix, by five Newton-Schulz iterations of Jordan et al. 2024."""
    # In the type of the matrix: rounded to bfloat16, the last bit of a mean over ranks would become the third digit of a step.
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon:
    """Muon for matrices, and AdamW for all other arrays of a group."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        options: Mapping[str, float],
        names: Sequence[str],
        is_matrix: Sequence[bool],
    ) -> None:
        """Start the moments ``names`` at zero; of each array, ``is_matrix`` says whether it is Muon's."""
        self._parts: list[tuple[list[int], Rule]] = []
        self.moments: dict[str, list[Any]] = {name: [None] * len(is_matrix) for name in names}
        for kind, own_names, matrices in (
            (_Orthogonal, ("mean",), True),
            (partial(Adam, decoupled=True), names, False),
        ):
            places = [place for place, each in enumerate(is_matrix) if each is matrices]
            rule: Rule = kind([parameters[place] for place in places], options, own_names)
            self._parts.append((places, rule))
            for name, tensors in rule.moments.items():
                for place, tensor in zip(places, tensors, strict=True):
                    self.moments[name][place] = tensor

    def leave_out(self, skip: Tensor | None) -> None:
        """See ``Rule.leave_out``."""
        for _, rule in self._parts:
            rule.leave_out(skip)

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        for _, rule in self._parts:
            rule.set_updates(updates)

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``; ``momentum`` is that of matrices."""
        given = dict(zip(places, grads, strict=True))
        for (own, rule), own_momentum in zip(self._parts, (momentum, None), strict=True):
            used = [number for number, place in enumerate(own) if place in given]
            if used:
                own_grads = [given[own[number]] for number in used]
                rule.apply(used, own_grads, learning_rate=learning_rate, momentum=own_momentum)


def _follow_(averages: list[Tensor], values: Sequence[Tensor], share: float) -> None:
    """Compute ``share * average + (1 - share) * value`` in place."""
    internals.scale_(averages, share)
    internals.add_scaled_(averages, internals.products(values, 1 - share), 1.0)


def _with_decay(grads: Sequence[Tensor], weights: list[Tensor], decay: float) -> list[Tensor]:
    """Return the gradients of a loss with the penalty ``decay / 2 * |weights| ** 2``."""
    if not decay:
        return list(grads)
    penalties = internals.products(weights, decay)
    internals.add_scaled_(penalties, list(grads), 1.0)
    return penalties


KINDS: Mapping[str, Callable[..., Rule]] = {
    "sgd": Sgd,
    "adam": partial(Adam, decoupled=False),
    "adamw": partial(Adam, decoupled=True),
    "lion": Lion,
    "rmsprop": RmsProp,
    "lamb": Lamb,
}
"""Maps ``Recipe.rule`` to its class.

Those that have no fused kernel multiply and add in separate steps, so vector and scalar code round alike."""


def make(
    rule: str, parameters: Sequence[Tensor], options: Mapping[str, float], *, is_matrix: Sequence[bool] = ()
) -> Rule:
    """Make the update rule of one group: ``muon``, which must know of each parameter whether it is a matrix, or one of ``KINDS``."""
    if rule == "muon":
        return Muon(parameters, options, MOMENTS[rule], is_matrix)
    return KINDS[rule](parameters, options, MOMENTS[rule])
