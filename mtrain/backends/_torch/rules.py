"""Update rules with the mathematics of torch.optim, on torch's fused kernels.

torch.optim itself is not used: constructing one of its optimizers imports the compiler (1.6 s), and its loop branches
at every step on options that a recipe has fixed. Every rule keeps its moments under neutral names.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mtrain.backends._torch import internals


class Rule(Protocol):
    """An update rule for the parameters of one group."""

    moments: dict[str, list[Tensor]]
    """Maps the name of a moment to one tensor per parameter."""

    def apply(self, places: Sequence[int], grads: Sequence[Tensor], *, rate: float, momentum: float | None) -> None:
        """Update the parameters at ``places`` of the group with ``grads``; ``momentum`` overrides the group's own."""
        ...

    def leave_out(self, skip: Tensor | None) -> None:
        """Make the next calls of ``apply`` change nothing where ``skip``, a float32 number on the device, is 1."""
        ...

    def set_updates(self, updates: int) -> None:
        """Set how many updates were made before, when a job resumes."""
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
        """See ``Rule.leave_out``."""
        self._skip = skip

    def apply(self, places: Sequence[int], grads: Sequence[Tensor], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        internals.sgd_(
            [self._parameters[i] for i in places],
            list(grads),
            [self.moments["momentum"][i] for i in places],
            rate=rate,
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
        """See ``Rule.leave_out``."""
        self._skip = skip

    def apply(self, places: Sequence[int], grads: Sequence[Tensor], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._updates += 1 if self._skip is None else 1 - self._skip
        internals.adam_(
            [self._parameters[i] for i in places],
            list(grads),
            [self.moments["mean"][i] for i in places],
            [self.moments["square"][i] for i in places],
            self._updates,
            rate=rate,
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


def make(rule: str, parameters: Sequence[Tensor], options: Mapping[str, float]) -> Rule:
    """Make the update rule of one group: ``sgd``, ``adam`` or ``adamw``."""
    if rule == "sgd":
        return Sgd(parameters, options)
    return Adam(parameters, options, decoupled=rule == "adamw")
