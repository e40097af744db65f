"""Schedulers of torch and Paddle that the script steps itself, with a stand-in for the optimizer that they know."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from mtrain.core.interfaces import Rates
from mtrain.errors import ScriptError

MakeScheduler: TypeAlias = Callable[[Any], Any]
"""Makes a scheduler of ``torch.optim.lr_scheduler`` from an optimizer, or one of ``paddle.optimizer.lr`` from a learning rate."""
Group: TypeAlias = Mapping[str, Any]
"""What schedulers of torch read and change of a parameter group: ``lr``, and ``momentum`` or ``betas`` where the rule has it."""


class SteppedScheduler:
    """A scheduler whose learning rate counts at each update, as the script has stepped it."""

    def __init__(self, scheduler: Any, groups: Sequence[Group], *, stand_in: Any, ratios_stay: bool) -> None:
        """Follow a scheduler.

        Args:
            scheduler: Of torch or Paddle.
            groups: The parameter groups of the model's optimizer, as they are without the scheduler.
            stand_in: The optimizer of torch that the scheduler changes, with as many groups; None: it is one of Paddle.
            ratios_stay: Whether the learning rates of the groups must keep their ratio to that of the first, which alone is then
                returned: for an optimizer of the framework.
        """
        self.scheduler = scheduler
        self._groups = [dict(group) for group in groups]
        self._stand_in = stand_in
        self._ratios_stay = ratios_stay
        self._moves_momentum = False
        if stand_in is not None:
            stand_in.step()  # else torch warns that the scheduler was stepped before the optimizer

    def __call__(self, update: int) -> Rates:
        """Return the learning rates, and the momentum where the scheduler has changed it, as they are now.

        Raises:
            ScriptError: the scheduler has changed the ratios of learning rates that must stay.
        """
        # Paddle's schedulers know one learning rate, and the groups have a share of it.
        if self._stand_in is None:
            learning_rate = float(self.scheduler())
            first = self._groups[0]["lr"]
            return Rates(learning_rates=[learning_rate * (group["lr"] / first) for group in self._groups])
        now = self._stand_in.param_groups
        rates = [float(group["lr"]) for group in now]
        if self._ratios_stay:
            wanted = [rates[0] * (group["lr"] / self._groups[0]["lr"]) for group in self._groups]
            if any(abs(rate - other) > 1e-9 * abs(other) for rate, other in zip(rates, wanted, strict=True)):
                raise ScriptError(
                    "session.prepare: the scheduler gives the parameter groups learning rates of other ratios than those of the optimizer; "
                    "that needs a rule of mtrain's with groups=[mtrain.Group(...)]"
                )
            rates = rates[:1]
        momentum = _momentum(now[0])
        # Also where it comes back to its first value: an optimizer of the framework keeps what was set last.
        self._moves_momentum = self._moves_momentum or momentum != _momentum(self._groups[0])
        return Rates(learning_rates=rates, momentum=momentum if self._moves_momentum else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``session.keep``."""
        state = {"scheduler": self.scheduler.state_dict()}
        if self._stand_in is None:
            return state
        groups = zip(self._groups, self._stand_in.param_groups, strict=True)
        return {**state, "groups": [{key: group[key] for key in own} for own, group in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` has returned."""
        if self._stand_in is None:
            self.scheduler.set_state_dict(state["scheduler"])
            return
        self.scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(self._stand_in.param_groups, state["groups"], strict=True):
            group.update(saved)


def make_scheduler(
    make: MakeScheduler, groups: Sequence[Group], *, framework: str, ratios_stay: bool
) -> SteppedScheduler:
    """Make the scheduler of a script, for an optimizer with these groups.

    Raises:
        ScriptError: the function returned something else than a scheduler.
    """
    stand_in: Any = _stand_in(groups) if framework == "torch" else None
    given = groups[0]["lr"] if stand_in is None else stand_in
    scheduler = make(given) if callable(make) else make
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        raise ScriptError(
            f"session.prepare: `scheduler` gave a {type(scheduler).__name__}; expected a function that makes a scheduler, such "
            "as lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), or, with Paddle, lambda learning_rate: "
            "paddle.optimizer.lr.ReduceOnPlateau(learning_rate)"
        )
    if stand_in is not None and getattr(scheduler, "optimizer", stand_in) is not stand_in:
        raise ScriptError(
            "session.prepare: `scheduler` has an optimizer of its own; make it of the one that the function receives: "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10); or return both from `optimizer`: "
            "lambda model: (optimizer, scheduler)"
        )
    return SteppedScheduler(scheduler, groups, stand_in=stand_in, ratios_stay=ratios_stay)


def adopt(scheduler: Any, optimizer: Any) -> SteppedScheduler:
    """Take over a scheduler that the script has made for its own optimizer of torch, which then has its first learning rates.

    Raises:
        ScriptError: it is none, or one of another optimizer.
    """
    refusal = ScriptError(
        f"session.prepare: `optimizer` returned an optimizer and a {type(scheduler).__name__}; expected a scheduler of this optimizer, of "
        "torch or with step(), state_dict(), load_state_dict(state) and the optimizer as an attribute, or give the scheduler as "
        "scheduler=lambda optimizer: ..."
    )
    wanted = ("step", "state_dict", "load_state_dict")
    if not hasattr(optimizer, "param_groups") or not all(hasattr(scheduler, name) for name in wanted):
        raise refusal
    stand_in = _stand_in([_read(group) for group in optimizer.param_groups])
    groups = dict(zip(map(id, optimizer.param_groups), stand_in.param_groups, strict=True))
    moves = {id(optimizer): stand_in, id(optimizer.param_groups): stand_in.param_groups, **groups}
    found: list[Any] = []
    if _move_objects(scheduler, moves, found) is not scheduler or not found:
        raise refusal
    # Any scheduler of torch marks the method `step` of its optimizer, and warns where it finds no mark.
    import_module("torch.optim.lr_scheduler").LambdaLR(stand_in, lambda _: 1.0)
    for own, group in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
        # A scheduler of the script's own may have begun with 0.
        own["lr"] = own.get("initial_lr", own["lr"]) or optimizer.defaults["lr"]
    return SteppedScheduler(scheduler, groups_of_native(optimizer), stand_in=stand_in, ratios_stay=True)


def _move_objects(value: Any, moves: dict[int, Any], found: list[Any]) -> Any:
    """Return a scheduler, or what it holds, with the objects in ``moves`` by identity replaced in place, which are added to ``found``."""
    if id(value) in moves:
        found += [value] if moves[id(value)] is not value else []
        return moves[id(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_move_objects(item, moves, found) for item in value)
    moves[id(value)] = value
    if isinstance(value, list):
        value[:] = [_move_objects(item, moves, found) for item in value]
    elif isinstance(value, dict):
        value.update({key: _move_objects(item, moves, found) for key, item in value.items()})
    elif hasattr(value, "step") and hasattr(value, "state_dict") and not hasattr(value, "param_groups"):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name, item in [(name, getattr(value, name)) for name in names]:
            if (moved := _move_objects(item, moves, found)) is not item:
                setattr(value, name, moved)
    return value


def _stand_in(groups: Sequence[Group]) -> Any:
    """Return an optimizer of torch with such groups, that changes nothing of the model."""
    torch: Any = import_module("torch")
    parts = [{"params": [torch.zeros(1, requires_grad=True)], **group} for group in groups]
    if "betas" in groups[0]:
        return torch.optim.Adam(parts)
    return torch.optim.SGD(parts)


def _momentum(group: Group) -> float | None:
    """Return what schedulers such as OneCycleLR cycle: the momentum, or the first of the betas."""
    if "betas" in group:
        return float(group["betas"][0])
    return float(group["momentum"]) if "momentum" in group else None


def groups_of_rule(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of a rule of mtrain's; ``optimizer``: the spec's section."""
    group: dict[str, Any] = {"lr": optimizer.learning_rate}
    if optimizer.rule in ("sgd", "rmsprop"):
        group["momentum"] = optimizer.momentum
    else:
        group["betas"] = (optimizer.momentum, optimizer.beta2)
    return [{**group, "lr": optimizer.learning_rate * part.learning_rate_factor} for part in optimizer.groups]


def groups_of_native(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer of the framework, with what schedulers read and change."""
    if hasattr(optimizer, "get_lr"):
        return [{"lr": float(optimizer.get_lr())}]
    return [_read(group) for group in optimizer.param_groups]


def _read(group: Group) -> dict[str, Any]:
    return {"lr": float(group["lr"]), **{key: group[key] for key in ("betas", "momentum") if key in group}}
