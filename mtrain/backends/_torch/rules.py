"""Update rules with the mathematics of torch.optim, on torch's fused kernels.

torch.optim itself is not used: constructing one of its optimizers imports the compiler (1.6 s), and its loop branches
at every step on options that a recipe has fixed. Every rule keeps its moments under neutral names.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mtrain.backends._torch import internals
from mtrain.core.overriding import override


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


class Sgd:
    """``torch.optim.SGD`` without dampening (Sutskever et al. 2013 for nesterov)."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        # torch starts without a buffer and sets it to the gradient; from zeros the first step gives the same,
        # 0 * momentum + grad.
        self.moments = {"momentum": [torch.zeros_like(p) for p in parameters]}
        self._skip: Tensor | None = None

    def leave_out(self, skip: Tensor | None) -> None:
        """Make the next calls of ``apply`` change nothing where ``skip``, a float32 number on the device, is 1."""
        self._skip = skip

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``."""
        internals.sgd_(
            [self._parameters[i] for i in places],
            list(grads),
            [self.moments["momentum"][i] for i in places],
            learning_rate=learning_rate,
            momentum=self._options.get("momentum", 0.0) if momentum is None else momentum,
            decay=self._options.get("weight_decay", 0.0),
            nesterov=bool(self._options.get("nesterov", 0.0)),
            skip=self._skip,
        )

    def set_updates(self, updates: int) -> None:
        """Do nothing: SGD does not depend on the number of updates."""


class Adam:
    """``torch.optim.Adam`` (Kingma and Ba 2015), or ``AdamW`` with ``decoupled`` decay (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float], *, decoupled: bool) -> None:
        self._parameters = parameters
        self._options = options
        self._decoupled = decoupled
        self.moments = {
            "mean": [torch.zeros_like(p) for p in parameters],
            "square": [torch.zeros_like(p) for p in parameters],
        }
        self._updates = torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else None)
        self._skip: Tensor | None = None

    def leave_out(self, skip: Tensor | None) -> None:
        """Make the next calls of ``apply`` change nothing where ``skip``, a float32 number on the device, is 1."""
        self._skip = skip

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``."""
        self._updates += 1 if self._skip is None else 1 - self._skip
        internals.adam_(
            [self._parameters[i] for i in places],
            list(grads),
            [self.moments["mean"][i] for i in places],
            [self.moments["square"][i] for i in places],
            self._updates,
            learning_rate=learning_rate,
            betas=(
                self._options.get("beta1", 0.9) if momentum is None else momentum,
                self._options.get("beta2", 0.999),
            ),
            decay=self._options.get("weight_decay", 0.0),
            eps=self._options.get("eps", 1e-8),
            decoupled=self._decoupled,
            skip=self._skip,
        )

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._updates.fill_(updates)


class Composed(ABC):
    """A rule of several kernels, which none of them can leave out: what it changed is put back, on the device.

    Where an update may be left out, weights and moments of the group are copied first.
    """

    moments: dict[str, list[Tensor]]

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._options = options
        self._skip: Tensor | None = None

    def leave_out(self, skip: Tensor | None) -> None:
        """See ``Rule.leave_out``."""
        self._skip = skip

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``Rule.apply``."""
        if self._skip is None:
            self._step(places, grads, learning_rate=learning_rate, momentum=momentum)
            return
        held = [x for tensors in (self._parameters, *self.moments.values()) for x in _at(tensors, places)]
        former = internals.copies(held)
        self._step(places, grads, learning_rate=learning_rate, momentum=momentum)
        internals.copy_if_(held, former, self._skip)

    @abstractmethod
    def _step(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """Do what ``apply`` does, unconditionally."""

    def set_updates(self, updates: int) -> None:
        """Do nothing: most of these rules do not depend on the number of updates."""
        return


class Lion(Composed):
    """Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2. Steps are signs of a mixture of mean and gradient."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        super().__init__(parameters, options)
        self.moments = {"mean": [torch.zeros_like(p) for p in parameters]}

    @override
    def _step(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        weights, means = _at(self._parameters, places), _at(self.moments["mean"], places)
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        mixtures = internals.products(means, beta1)
        internals.add_scaled_(mixtures, internals.products(grads, 1 - beta1), 1.0)
        steps = internals.signs(mixtures)
        if decay := self._options.get("weight_decay", 0.0):
            internals.scale_(weights, 1 - learning_rate * decay)
        internals.scale_(steps, -learning_rate)
        internals.add_scaled_(weights, steps, 1.0)
        _follow_(means, grads, self._options.get("beta2", 0.99))


class RmsProp(Composed):
    """``torch.optim.RMSprop``, not centred: Tieleman and Hinton 2012, lecture 6.5; with momentum as Graves 2013 adds it."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        super().__init__(parameters, options)
        self.moments = {name: [torch.zeros_like(p) for p in parameters] for name in ("square", "momentum")}

    @override
    def _step(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        weights = _at(self._parameters, places)
        squares, velocities = _at(self.moments["square"], places), _at(self.moments["momentum"], places)
        grads = _with_decay(grads, weights, self._options.get("weight_decay", 0.0))
        _follow_(squares, internals.products(grads, grads), self._options.get("beta2", 0.99))
        roots = internals.roots(squares)
        internals.shift_(roots, self._options.get("eps", 1e-8))
        internals.scale_(velocities, self._options.get("momentum", 0.0) if momentum is None else momentum)
        internals.add_scaled_(velocities, internals.quotients(grads, roots), 1.0)
        internals.add_scaled_(weights, internals.products(velocities, -learning_rate), 1.0)


class Adadelta(Composed):
    """``torch.optim.Adadelta``: Zeiler 2012 (arXiv 1212.5701), algorithm 1, whose step is multiplied by the learning rate."""

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        super().__init__(parameters, options)
        self.moments = {name: [torch.zeros_like(p) for p in parameters] for name in ("square", "step_square")}

    @override
    def _step(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        # The rule has no momentum.
        weights, decay_rate = _at(self._parameters, places), self._options.get("beta2", 0.9)
        squares, step_squares = _at(self.moments["square"], places), _at(self.moments["step_square"], places)
        eps = self._options.get("eps", 1e-6)
        grads = _with_decay(grads, weights, self._options.get("weight_decay", 0.0))
        _follow_(squares, internals.products(grads, grads), decay_rate)
        steps = internals.quotients(_roots_of_shifted(step_squares, eps), _roots_of_shifted(squares, eps))
        steps = internals.products(steps, grads)
        _follow_(step_squares, internals.products(steps, steps), decay_rate)
        internals.add_scaled_(weights, internals.products(steps, -learning_rate), 1.0)


class Lamb(Composed):
    """LAMB: You et al. 2020 (arXiv 1904.00962), algorithm 2, with the identity as its function phi.

    Adam's step of each array, decay included, gets the length of the array; without either length it stays as it is.
    """

    def __init__(self, parameters: Sequence[Tensor], options: Mapping[str, float]) -> None:
        super().__init__(parameters, options)
        self.moments = {name: [torch.zeros_like(p) for p in parameters] for name in ("mean", "square")}
        self._updates = 0

    @override
    def _step(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        self._updates += 1
        weights = _at(self._parameters, places)
        means, squares = _at(self.moments["mean"], places), _at(self.moments["square"], places)
        beta1 = self._options.get("beta1", 0.9) if momentum is None else momentum
        beta2 = self._options.get("beta2", 0.999)
        _follow_(means, grads, beta1)
        _follow_(squares, internals.products(grads, grads), beta2)
        roots = internals.roots(internals.products(squares, 1 / (1 - beta2**self._updates)))
        internals.shift_(roots, self._options.get("eps", 1e-6))
        steps = internals.quotients(internals.products(means, 1 / (1 - beta1**self._updates)), roots)
        if decay := self._options.get("weight_decay", 0.0):
            internals.add_scaled_(steps, internals.products(weights, decay), 1.0)
        lengths = torch.stack(internals.norms(weights)), torch.stack(internals.norms(steps))
        ratios = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], 1.0)
        internals.add_scaled_(weights, internals.products(steps, list((ratios * -learning_rate).unbind())), 1.0)

    @override
    def set_updates(self, updates: int) -> None:
        self._updates = updates


def _at(tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    return [tensors[i] for i in places]


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


def _roots_of_shifted(tensors: list[Tensor], by: float) -> list[Tensor]:
    shifted = internals.products(tensors, 1.0)
    internals.shift_(shifted, by)
    return internals.roots(shifted)


KINDS: Mapping[str, Callable[[Sequence[Tensor], Mapping[str, float]], Rule]] = {
    "sgd": Sgd,
    "adam": partial(Adam, decoupled=False),
    "adamw": partial(Adam, decoupled=True),
    "lion": Lion,
    "rmsprop": RmsProp,
    "adadelta": Adadelta,
    "lamb": Lamb,
}
"""Maps ``Recipe.rule`` to its class.

Those that have no fused kernel multiply and add in separate steps, so vector and scalar code round alike."""


def make(rule: str, parameters: Sequence[Tensor], options: Mapping[str, float]) -> Rule:
    """Make the update rule of one group: one of ``KINDS``."""
    return KINDS[rule](parameters, options)
