"""A user's own ``torch.optim`` optimizer in the place of mtrain's update rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.core.interfaces import Array, Recipe
from mtrain.errors import SpecError

TENSOR, INTEGER, NUMBER = "native.", "native_int.", "native_float."
"""Prefixes of moments: an entry of the optimizer's state that is a tensor, an int or a float."""
OF_GROUP = "native_group."
"""Prefix of moments: a number of the parameter's group that has changed while training, such as a count of updates."""
ITEM = "#"
"""Separates the key of a list in the state from the place in it."""
SCRATCH = "al"
"""Entry of LBFGS that each update computes anew."""
CLOSURE_WORDS = (
    "session.prepare: torch.optim.LBFGS computes the loss several times per update; write session.prepare(..., overlap=False), and "
    "optimizer.step(closure) with a function that calls optimizer.backward(loss)"
)


class Made:
    """The optimizer that a script has made for its model, in the place of ``Recipe.native_optimizer``.

    It is made while the model is whole, because the script may choose its parameter groups by shape.
    """

    def __init__(self, make: Callable[[nn.Module], Any], model: nn.Module) -> None:
        """Make the optimizer of ``model``.

        Raises:
            SpecError: ``make`` returned something that cannot be used.
        """
        optimizer = make(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"session.prepare: `optimizer` returned a {type(optimizer).__name__}; expected one of torch.optim"
            )
        self.optimizer = optimizer
        self.parameters = dict(model.named_parameters())
        """The parameters of the model, for which it was made, by name."""
        self.shapes = {id(parameter): parameter.shape for parameter in self.parameters.values()}
        """Their shapes by identity; a backend may change that of the parameter itself when it splits it."""
        if any(id(parameter) not in self.shapes for group in optimizer.param_groups for parameter in group["params"]):
            raise SpecError(
                "session.prepare: `optimizer` was given parameters that are not those of the model that it received; "
                "write lambda model: torch.optim.SGD(model.parameters(), lr=...)"
            )

    def __call__(self, _: object) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.optimizer

    def forget(self) -> None:
        """Drop the whole parameters, once a copy of the optimizer steps parts of them."""
        self.parameters.clear()
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()


def make_native(recipe: Recipe, model: nn.Module) -> Recipe:
    """Return ``recipe`` with the script's own optimizer made for ``model``, before a backend splits or wraps the model.

    Raises:
        SpecError: see ``Made``.
    """
    if recipe.native_optimizer is None or isinstance(recipe.native_optimizer, Made):
        return recipe
    return replace(recipe, native_optimizer=Made(recipe.native_optimizer, model))


@dataclass(frozen=True)
class Modes:
    """The methods of optimizers that hold one set of weights to train and another one to evaluate (Defazio et al. 2024)."""

    train: Callable[[], Any]
    evaluate: Callable[[], Any]

    @classmethod
    def of(cls, optimizer: Any) -> "Modes | None":
        """Return the methods ``train`` and ``eval`` of an optimizer; None if it lacks them."""
        train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
        return cls(train, evaluate) if callable(train) and callable(evaluate) else None


class NativeRule:
    """Applies an optimizer of torch to whole parameters; see ``rules.Rule``.

    Gradients are averaged over the ranks and clipped before. mtrain sets the learning_rate: that of the first parameter group is
    the scheduled one, and the others keep their ratio to it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        """Apply ``optimizer``; ``parameters``: those that are trained."""
        self._optimizer = optimizer
        self._parameters = parameters
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._ratios = [learning_rate / rates[0] for learning_rate in rates]
        self._rates = rates
        self.needs_closure = isinstance(optimizer, torch.optim.LBFGS)
        """Whether it computes the loss several times per update."""
        self.modes = Modes.of(optimizer)
        """Its two modes; None: it has one, as those of torch."""
        if self.modes is not None:
            self.modes.train()
        self._group_start = [_numbers(group) for group in optimizer.param_groups]
        self._changing: set[tuple[int, str]] = set()
        """(number of a group, key) of the numbers of groups that have changed since the optimizer was made."""

    @property
    def moments(self) -> dict[str, list[Tensor | None]]:
        """The optimizer's state by entry: one value per parameter, None where it has none (yet).

        Raises:
            SpecError: an entry is neither a tensor nor a number.
        """
        found: dict[str, list[Tensor | None]] = {}
        for place, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                for name, tensor in _as_tensors(str(key), value).items():
                    found.setdefault(name, [None] * len(self._parameters))[place] = tensor
        self._notice_changes()
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        for number, key in sorted(self._changing):
            group = self._optimizer.param_groups[number]
            _, tensor = _as_tensor(key, group[key])
            for parameter in group["params"]:
                if id(parameter) in places:
                    found.setdefault(OF_GROUP + key, [None] * len(places))[places[id(parameter)]] = tensor
        return found

    def _notice_changes(self) -> None:
        for number, (group, start) in enumerate(zip(self._optimizer.param_groups, self._group_start, strict=True)):
            self._changing |= {(number, key) for key, value in _numbers(group).items() if start.get(key) != value}

    def expect(self, names: Sequence[str], saved: Mapping[str, Array]) -> None:
        """Set the state from saved moments, ``<moment>/<parameter name>``; torch creates it in the first update only."""
        by_name: dict[str, dict[str, Array]] = {}
        for path, array in saved.items():
            moment, _, name = path.partition("/")
            by_name.setdefault(name, {})[moment] = array
        for place, name in enumerate(names):
            entries = (self._entry(moment, array, place) for moment, array in by_name.get(name, {}).items())
            if state := _with_lists(dict(entry for entry in entries if entry is not None)):
                self._optimizer.state[self._parameters[place]] = state
        self._expect_numbers(dict(zip(names, self._parameters, strict=True)), by_name)

    def _expect_numbers(self, parameters: Mapping[str, Tensor], saved: Mapping[str, Mapping[str, Array]]) -> None:
        """Set the numbers of parameter groups; each parameter has those of its group."""
        group_of = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        for name, parameter in parameters.items():
            number = group_of.get(id(parameter))
            for moment, array in saved.get(name, {}).items():
                key = moment.removeprefix(OF_GROUP)
                if number is not None and key != moment:
                    group = self._optimizer.param_groups[number]
                    group[key] = type(group.get(key, 0.0))(array)
                    self._changing.add((number, key))

    def _entry(self, moment: str, array: Array, place: int) -> tuple[str, Any] | None:
        """Return (key, value) of the state of the parameter at ``place``; None for another kind of moment."""
        if moment.startswith(INTEGER):
            return moment.removeprefix(INTEGER), int(array)
        if moment.startswith(NUMBER):
            return moment.removeprefix(NUMBER), float(array)
        if moment.startswith(TENSOR):
            tensor = torch.from_numpy(np.array(array))
            on_host = array.ndim == 0 and not self._counts_on_device
            return moment.removeprefix(TENSOR), tensor if on_host else tensor.to(self._parameters[place].device)
        return None

    @property
    def _counts_on_device(self) -> bool:
        """Whether counters such as ``step`` are where the parameters are; else torch keeps them on the host."""
        return any(group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups)

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


def _with_lists(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the items of lists joined."""
    lists: dict[str, list[Any]] = {}
    for key in sorted(state):
        whole, separator, _ = key.partition(ITEM)
        if separator:
            lists.setdefault(whole, []).append(state.pop(key))
    return state | lists


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group without the learning rate, which mtrain sets."""
    return {key: value for key, value in group.items() if key != "lr" and isinstance(value, int | float)}
