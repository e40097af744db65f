"""A user's own ``torch.optim`` optimizer in the place of mtrain's update rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.core.interfaces import Array
from mtrain.errors import SpecError

TENSOR, INTEGER, NUMBER = "native.", "native_int.", "native_float."
"""Prefixes of moments: an entry of the optimizer's state that is a tensor, an int or a float."""
ITEM = "#"
"""Separates the key of a list in the state from the place in it."""
SCRATCH = "al"
"""Entry of LBFGS that each update computes anew."""
CLOSURE_WORDS = (
    "session.prepare: torch.optim.LBFGS computes the loss several times per update; write session.prepare(..., overlap=False), and "
    "optimizer.step(closure) with a function that calls optimizer.backward(loss)"
)


class NativeRule:
    """Applies an optimizer of torch to whole parameters; see ``rules.Rule``.

    Gradients are averaged over the ranks and clipped before. mtrain sets the learning_rate: that of the first parameter group is
    the scheduled one, and the others keep their ratio to it.
    """

    def __init__(self, make: Callable[[nn.Module], Any], model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Make the optimizer of ``model``, whose trained parameters are ``parameters``.

        Raises:
            SpecError: ``make`` returned something that cannot be used.
        """
        if not isinstance(model, nn.Module):
            raise SpecError(split_message("this backend"))
        optimizer = make(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"session.prepare: `optimizer` returned a {type(optimizer).__name__}; expected one of torch.optim"
            )
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise SpecError(
                "session.prepare: `optimizer` was given parameters that are not those of the model that it received; "
                "write lambda model: torch.optim.SGD(model.parameters(), lr=...)"
            )
        self._optimizer = optimizer
        self._parameters = parameters
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._ratios = [learning_rate / rates[0] for learning_rate in rates]
        self._rates = rates
        self.needs_closure = isinstance(optimizer, torch.optim.LBFGS)
        """Whether it computes the loss several times per update."""

    @property
    def moments(self) -> dict[str, list[Tensor | None]]:
        """The optimizer's state by entry: one value per parameter, None where it has none (yet).

        Raises:
            SpecError: an entry is neither a tensor nor a number.
        """
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        found: dict[str, list[Tensor | None]] = {}
        for place, state in enumerate(states):
            for key, value in state.items():
                for name, tensor in _as_tensors(str(key), value).items():
                    found.setdefault(name, [None] * len(states))[place] = tensor
        return found

    def expect(self, names: Sequence[str], saved: Mapping[str, Array]) -> None:
        """Set the state from saved moments, ``<moment>/<parameter name>``; torch creates it in the first update only."""
        for name, parameter in zip(names, self._parameters, strict=True):
            state: dict[str, Any] = {}
            for path, array in saved.items():
                moment, _, of = path.partition("/")
                if of == name and (entry := _from_array(moment, array, parameter)) is not None:
                    state[entry[0]] = entry[1]
            lists: dict[str, list[Any]] = {}
            for key in sorted(state):
                whole, separator, _ = key.partition(ITEM)
                if separator:
                    lists.setdefault(whole, []).append(state.pop(key))
            state |= lists
            if state:
                self._optimizer.state[parameter] = state

    def apply(
        self, places: Sequence[int], grads: Sequence[Tensor], *, learning_rate: float, momentum: float | None
    ) -> None:
        """See ``rules.Rule``; the gradients are those that the parameters hold.

        Raises:
            SpecError: something else than mtrain has changed the learning rate.
        """
        if self.needs_closure:
            raise SpecError(CLOSURE_WORDS)
        self._set_rates(learning_rate)
        if momentum is not None:
            self._set_momentum(momentum)
        self._optimizer.step()

    def apply_by(self, evaluate: Callable[[], float], *, learning_rate: float) -> None:
        """Make an update by an optimizer that calls ``evaluate`` for the loss, which leaves the gradients.

        Raises:
            SpecError: something else than mtrain has changed the learning rate.
        """
        self._set_rates(learning_rate)
        self._optimizer.step(evaluate)

    def _set_rates(self, learning_rate: float) -> None:
        groups = self._optimizer.param_groups
        if [float(group["lr"]) for group in groups] != self._rates:
            raise SpecError(
                "session.prepare: the learning rate of the script's optimizer was changed from outside, such as by a scheduler of "
                "torch; give the schedule to session.prepare(schedule=...), or the scheduler to session.prepare(scheduler=...)"
            )
        self._rates = [learning_rate * ratio for ratio in self._ratios]
        for group, own_learning_rate in zip(groups, self._rates, strict=True):
            group["lr"] = own_learning_rate

    def _set_momentum(self, momentum: float) -> None:
        """Set what schedulers such as OneCycleLR cycle."""
        for group in self._optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = momentum

    def leave_out(self, skip: Tensor | None) -> None:
        """Do nothing: the optimizer cannot leave an update out, so its updates are never late."""

    def set_updates(self, updates: int) -> None:
        """Do nothing: the optimizer's state counts its updates."""


def split_message(backend: str) -> str:
    """Return the refusal of a user's own optimizer where arrays are split over ranks."""
    return (
        f"session.prepare: {backend} splits arrays over the ranks, but an optimizer of torch.optim needs whole ones; use "
        "backend solo, ddp, horovod or deepspeed with stage 0, or a rule such as mtrain.AdamW(learning_rate=1e-3)"
    )


def _as_tensors(key: str, value: Any) -> dict[str, Tensor]:
    """Return an entry of an optimizer's state as tensors by name of the moment: none of scratch space."""
    if value is None or key == SCRATCH:
        return {}
    values = (
        {f"{key}{ITEM}{place:06d}": item for place, item in enumerate(value)}
        if isinstance(value, list)
        else {key: value}
    )
    return {prefix + name: tensor for name, item in values.items() for prefix, tensor in [_as_tensor(name, item)]}


def _as_tensor(key: str, value: Any) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return TENSOR, value
    if isinstance(value, int):
        return INTEGER, torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return NUMBER, torch.tensor(value, dtype=torch.float64)
    raise SpecError(
        f"session.prepare: the state of the script's optimizer holds a {type(value).__name__} under {key!r}, which cannot "
        "be saved; expected tensors and numbers"
    )


def _from_array(moment: str, array: Array, parameter: Tensor) -> tuple[str, Any] | None:
    """Return (key, value) of the optimizer's state; None for a moment of mtrain's own rules."""
    if moment.startswith(INTEGER):
        return moment.removeprefix(INTEGER), int(array)
    if moment.startswith(NUMBER):
        return moment.removeprefix(NUMBER), float(array)
    if moment.startswith(TENSOR):
        # torch keeps counters such as `step` on the host.
        tensor = torch.from_numpy(np.array(array))
        return moment.removeprefix(TENSOR), tensor if array.ndim == 0 else tensor.to(parameter.device)
    return None
