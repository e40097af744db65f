"""The optimizer that ``session.prepare`` returns: it takes losses, in one call or in the steps of a plain loop."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mtrain.core.interfaces import Optimizer, Rates
from mtrain.core.update.stepping import Stepper, Use
from mtrain.errors import ScriptError
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.loss_weights import LossKind
from mtrain.spec.calls import explain_calls


class NotOfUpdater(ScriptError, AttributeError):
    """A member that optimizers of frameworks have, and that of a script does not need."""


RATE_WORDS = (
    "the learning rate is the rule's times the schedule's factor: session.prepare(schedule=mtrain.Cosine()), or a function from the "
    "number of the update to the learning rate, schedule=lambda update: 0.1 * 0.99**update"
)
INSTEAD: Mapping[str, str] = {
    "minimize": "call optimizer.update(loss) once per batch: it computes the gradient, averages it over the ranks, clips and "
    "steps. Leave out loss.backward() and optimizer.zero_grad()",
    **dict.fromkeys(("zerograd", "cleargrad"), "leave it out: optimizer.update(loss), or step(), clears the gradient"),
    **dict.fromkeys(("setlr", "getlr", "lr", "learningrate", "paramgroups", "setlrscheduler"), RATE_WORDS),
    **dict.fromkeys(
        ("statedict", "setstatedict", "loadstatedict"), "leave it out: checkpoints hold the optimizer's state"
    ),
}
"""What to write in the place of members of torch's and Paddle's optimizers, by their names without ``_`` in lower case."""


@explain_calls
class Updater:
    """The optimizer of a model: one call of ``update`` for each micro batch, or ``backward`` and ``step``."""

    def __init__(self, optimizer: Optimizer, scheduler: Any = None, *, untrained: str = "") -> None:
        self.native = optimizer
        """The backend's own optimizer object."""
        self._untrained = untrained
        self.scheduler = scheduler
        """What ``session.prepare(scheduler=...)`` has made, for the script to step; None: the schedule is mtrain's."""
        self.loop: ScriptLoop | None = None
        self.stepper: Stepper | None = None
        """Set once the training loop exists."""

    @property
    def norm(self) -> float:
        """Norm of the last update's gradient, before clipping."""
        return math.nan if self.stepper is None else self.stepper.norm

    @property
    def updated(self) -> bool:
        """Whether the update in hands is complete: the weights have changed, and no micro batch of it is left.

        An update that was left out because its gradient is not finite counts, as for schedules; one that ``skip`` has dropped
        does not.
        """
        return self.stepper is not None and self.stepper.use is Use.STEPPED

    @property
    def rates(self) -> Rates | None:
        """Rates of the last update."""
        return None if self.stepper is None or not self.stepper.rates.learning_rates else self.stepper.rates

    def __getattr__(self, name: str) -> Any:
        """Refuse members of the framework's optimizers, and say what to write in their place."""
        # Spellings of both frameworks and all versions are alike without `_` and capitals: `zero_grad`, `clear_grad`, `set_lr`.
        instead = INSTEAD.get(name.replace("_", "").lower())
        if instead is None:
            raise AttributeError(
                f"mtrain's optimizer has no {name!r}; it has update(), backward(), gradients(), step(), skip(), updated, norm, rates"
            )
        raise NotOfUpdater(f"optimizer.{name}: {instead}")

    def update(self, loss: Any, *, retain_graph: bool = False, reduction: str = "mean", weight: Any = None) -> None:
        """Use the loss of the current micro batch; the last one of an update changes the weights.

        Of several models, the gradients of this optimizer's own model alone are computed.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.
            retain_graph: Another model's loss is computed from the same graph afterwards.
            reduction: ``sum``: the loss is a sum over the micro batch, and what is trained is the sum over the global batch.
            weight: Number of tokens or whatever else the loss is a mean over, of this micro batch; a number or a tensor. What
                is trained is the mean over those of the global batch. With ``reduction="sum"`` the loss is their sum. Every rank
                must give it, for each micro batch.

        Raises:
            ScriptError: there is no batch in hands, it was used already, the loss is not a number with a gradient, or the weights of
                the update are all 0.
        """
        # One call is both for whoever has one loss; with accumulation `step` does nothing before the last micro batch.
        loop, stepper = self._in_loop("update")
        kind = LossKind.of(reduction, weight)
        loop.backward(stepper, loss, retain_graph=retain_graph, call="update", kind=kind)
        loop.step(stepper)

    def backward(self, loss: Any, *, retain_graph: bool = False, reduction: str = "mean", weight: Any = None) -> None:
        """Add the gradient of a loss of the current micro batch, as ``loss.backward()`` does; ``step`` must follow.

        It may be called for several losses if the model was prepared with a name or ``overlap=False``.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.
            retain_graph: Another loss is computed from the same graph afterwards.
            reduction: As for ``update``.
            weight: As for ``update``; of several losses per batch, each has its own.

        Raises:
            ScriptError: as for ``update``.
        """
        loop, stepper = self._in_loop("backward")
        kind = LossKind.of(reduction, weight)
        loop.backward(stepper, loss, retain_graph=retain_graph, call="backward", kind=kind)

    def gradients(
        self, loss: Any = None, *, retain_graph: bool = False, reduction: str = "mean", weight: Any = None
    ) -> Mapping[str, Any]:
        """Return the gradients by name of the parameter, as means over the ranks, before clipping. Every rank must call.

        Without ``loss`` they are tensors that may be changed in place; ``step`` uses what is in them then. They are there after
        the last micro batch of an update.

        Args:
            loss: A loss that is taken as by ``backward``. A copy of its own gradients is returned, without those of other losses.
            retain_graph: Another loss is computed from the same graph afterwards.
            reduction: As for ``update``, with ``loss``.
            weight: Likewise.

        Raises:
            ScriptError: there is no gradient, or the update has further micro batches; with ``loss`` also as for ``backward``.
        """
        loop, stepper = self._in_loop("gradients")
        if loss is None:
            return loop.gradients(stepper)
        return loop.gradients_of(stepper, loss, retain_graph=retain_graph, kind=LossKind.of(reduction, weight))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the weights by the gradient of the losses given to ``backward``. Every rank must call.

        With accumulation, only the call after the last micro batch of an update does anything.

        Args:
            closure: For optimizers such as ``torch.optim.LBFGS``, in place of ``backward`` before: a function that computes the loss of
                the micro batch and gives it to ``optimizer.backward``. It is called as often as the optimizer likes, on all
                ranks alike.

        Returns:
            What the first call of ``closure`` returned; None without one.

        Raises:
            ScriptError: ``backward`` was not called before, or was and there is a closure.
        """
        loop, stepper = self._in_loop("step")
        return loop.step(stepper) if closure is None else loop.step_by(stepper, closure)

    def skip(self) -> None:
        """Drop the gradient instead of changing the weights by it. Every rank must call, by a decision that is equal on all.

        Raises:
            ScriptError: ``backward`` was not called before.
        """
        loop, stepper = self._in_loop("skip")
        loop.step(stepper, skips=True)

    def _in_loop(self, call: str) -> tuple[ScriptLoop, Stepper]:
        if self._untrained:
            raise ScriptError(
                f"optimizer.{call}: the model {self._untrained} was prepared without an optimizer, so nothing trains it; give "
                f"session.prepare(..., name={self._untrained!r}) one, or move its weights by session.follow"
            )
        if self.loop is None or self.loop.has_ended or self.stepper is None:
            raise ScriptError(f"optimizer.{call}: called outside of `for batch in session.batches(...)`")
        return self.loop, self.stepper
