"""The order of one update, which is the same on every framework and every backend.

A framework's engine supplies the primitives: differentiate a loss, take the gradients, compute their norm, multiply
them, apply the update rules, clear them. Only this module decides their order, because that is where training stacks
differ.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from mtrain.core.interfaces import Array, Rates, Recipe
from mtrain.core.network.noise import shard_seed
from mtrain.core.network.quantising import Ranges
from mtrain.core.update.loss_scale import LossScaler
from mtrain.core.update.masking import Masking
from mtrain.errors import SpecError

Gradients = TypeVar("Gradients")
NORM_EPSILON = 1e-6
"""Value added to the norm when clipping, as ``torch.nn.utils.clip_grad_norm_`` does."""


class Exchange(Protocol):
    """How gradients become their mean over ranks, which is the only difference between backends on one engine."""

    def during(self, *, last: bool) -> AbstractContextManager[object]:
        """Return a context for forward and backward of a micro batch; ``last``: the last one of its update."""
        ...

    def finish(self) -> None:
        """Complete the exchange after the last backward pass: when this returns, gradients are averaged."""
        ...


class WeightAverage(Protocol):
    """The exponential moving average of weights and float buffers."""

    def follow(self, update: int) -> None:
        """Fold in the weights after update ``update`` (1-based)."""
        ...

    def remember(self) -> None:
        """Copy what may change before ``follow`` is called for the update just made: the buffers."""
        ...

    def restart(self) -> None:
        """Set the average to the current weights."""
        ...

    def swap(self) -> None:
        """Exchange the values of model and average."""
        ...


NO_CLOSURE = (
    "optimizer.step(closure): given for an update rule that computes its loss once; use step() without it, or an optimizer of "
    "torch.optim that needs one: session.prepare(optimizer=lambda model: torch.optim.LBFGS(model.parameters()), overlap=False)"
)
NO_GRADIENTS_OF = "optimizer.gradients(loss): this backend does not show the gradients of one of several losses; use solo, ddp or horovod"
LATE_METHODS = {"step": "step_later", "_clip": "_clip_late", "_multiply": "_clip_late"}
"""Maps methods of an update to those that do the same without waiting for the device."""


def _follows(kind: type, late: str, prompt: str) -> bool:
    """Return whether ``late`` was defined where ``prompt`` was, or in a class that derives from that one."""
    places = {name: next(i for i, parent in enumerate(kind.__mro__) if name in vars(parent)) for name in (late, prompt)}
    return places[late] <= places[prompt]


class _FirstNotFinite(Exception):
    """The first gradient of an update with ``evaluate`` is not finite."""


class UpdateOrder(ABC, Generic[Gradients]):
    """Runs an update in the order that ``core.interfaces.Optimizer`` defines, with the primitives of a framework.

    A subclass sets ``_average`` (None where the recipe has none) and calls ``_seed_next`` at the end of its
    constructor.

    ``step`` reads the norm in mid-update. ``step_later`` leaves it on the device, which applies the update or not; what
    the host has to know is read one update later, while the device computes the next one (``settle``).
    """

    _average: WeightAverage | None

    def __init__(self, recipe: Recipe, *, exchange: Exchange, rank: int) -> None:
        """Start at update 0; every rank must call."""
        self._recipe = recipe
        self._exchange = exchange
        self._rank = rank
        self._scaler = LossScaler(recipe.precision)
        self._ranges: Ranges | None = None
        self._masking: Masking[Any] | None = None
        self._late: Callable[[], Array] | None = None
        """Waits for the device, and returns the norm and the metrics of an update that it may still be computing."""
        self._averaged_gradients: Gradients | None = None
        """Gradients of the update in hands that are means over the ranks already, without the loss scale."""
        self._divisor = 1.0
        """By what the gradients of the update in hands are divided once they are exchanged, beside the loss scale."""
        self._restore_buffers: Callable[[], None] | None = None
        self.updates = 0
        self.skipped = 0
        self.skipped_in_a_row = 0

    # ------------------------------------------------------------------------------------------------- one update
    @contextmanager
    def micro_batch(self, *, last: bool, moves_buffers: bool = True) -> Iterator[None]:
        """See ``Optimizer.micro_batch``."""
        self._restore_buffers = None if moves_buffers else self._copy_buffers()
        with self._exchange.during(last=last), self._forward_context():
            yield
        self._end_forward()

    def _end_forward(self) -> None:
        """Put the buffers back that the micro batch in hands was not to move."""
        restore, self._restore_buffers = self._restore_buffers, None
        if restore is not None:
            with self._without_graph():
                restore()

    def backward(self, loss: Any, *, retain_graph: bool = False, divisor: float = 1.0) -> None:
        """See ``Optimizer.backward``."""
        self._divisor = divisor
        if self._scaler.active:  # whether the update before was applied decides about the scale of this one
            self.settle()
        with self._backward_context():
            factor = self._scaler.scale / self._recipe.accumulate
            # Only said where it is no default: engines of other projects may not know the argument.
            kept = {"retain_graph": True} if retain_graph else {}
            self._differentiate(loss if factor == 1 else loss * factor, **kept)

    def gradients(self, loss: Any = None, *, retain_graph: bool = False) -> Mapping[str, Any]:
        """See ``Optimizer.gradients``."""
        if loss is not None:
            return self._gradients_of(loss, retain_graph=retain_graph)
        with self._without_graph():
            return self._by_name(self._exchange_gradients())

    def _gradients_of(self, loss: Any, *, retain_graph: bool) -> Mapping[str, Any]:
        raise SpecError(NO_GRADIENTS_OF)

    @property
    def _scale(self) -> float:
        """By how much the exchanged gradients are too large."""
        return self._scaler.scale * self._divisor

    def _exchange_gradients(self) -> Gradients:
        """Return the means of the gradients over the ranks, without the loss scale; every rank must call."""
        if self._averaged_gradients is None:
            self.settle()
            self._exchange.finish()
            self._averaged_gradients = self._gradients()
            if self._scale != 1:
                self._multiply(self._averaged_gradients, 1 / self._scale)
        return self._averaged_gradients

    def step(self, rates: Rates, evaluate: Callable[[], float] | None = None) -> float:
        """See ``Optimizer.step``. An update whose norm is not finite changes no weight, moment or average; it is counted."""
        return self._update(rates) if evaluate is None else self._update_by(rates, evaluate)

    def step_later(
        self, rates: Rates, numbers: Sequence[float], tensors: Sequence[Any]
    ) -> Callable[[], tuple[float, Array]]:
        """See ``Optimizer.step_later``: the same values as ``step``, bit for bit, without waiting for the device."""
        self._update(rates, send=lambda norm: self._send(norm, numbers, tensors))
        late = self._late
        assert late is not None, "the update has sent it"

        def read() -> tuple[float, Array]:
            values = late()
            return float(values[0]), values[1:]

        return read

    def _update(self, rates: Rates, *, send: Callable[[Any], Callable[[], Array]] | None = None) -> float:
        """Change the weights once, by the gradients of this rank's micro batches: the order of every update, of all backends.

        Args:
            rates: learning rates and momentum.
            send: sends the norm to the host, without waiting for it: the device decides by itself whether it applies the update,
                and the host counts it one update later (``settle``). None: the host reads the norm, and decides.

        Returns:
            The norm of the gradients before they are clipped; where it was sent, NaN.
        """
        # Whether the update before was applied is known now at the latest: it decides about the loss scale of this one.
        self.settle()
        # A script of its own order steps before its micro batch is left, so within mixed precision.
        self._end_forward()
        with self._without_graph(), self._backward_context() if self._recipe.own_order else nullcontext():
            # Each rank has the gradients of its own samples up to here. From here on all have the mean over the ranks, and whatever
            # follows is the same everywhere. Gradients at which a script has looked are means already, and may have been changed.
            scale, looked_at, self._averaged_gradients = self._scale, self._averaged_gradients, None
            if looked_at is None:
                self._exchange.finish()
                gradients = self._gradients()
            else:
                gradients, scale = self._as_changed(looked_at), 1.0
            # The norm is taken once over all parameters, before clipping: it is what records show, and what decides.
            norm = (float(self._norm(gradients)) if send is None else self._norm(gradients)) / scale
            if send is not None:
                if scale != 1 or math.isfinite(self._recipe.clip_norm):
                    self._clip_late(gradients, norm)
                self._apply_rules(gradients, rates, norm)
            elif math.isfinite(norm):
                # Clipping and the loss scale are one factor, so that gradients are read and written once.
                self._clip(gradients, norm, scale)
                self._apply_rules(gradients, rates)
                # What was pruned stays away, whatever moments the rules have kept of it.
                if self._masking is not None:
                    self._masking.follow(rates)
            if send is None:
                # The average follows the weights as they are now, and counts only updates that were made.
                self._count(norm)
            else:
                # The average follows this update before the next one changes the weights, so its buffers are copied now.
                self._late = cache(send(norm))
                if self._average is not None:
                    self._average.remember()
            # The next update begins with no gradient, and with random numbers that a resumed job draws again.
            self._clear_gradients()
            self._seed_next()
        return norm if send is None else math.nan

    def _as_changed(self, averaged: Gradients) -> Gradients:
        """Return the gradients that ``gradients`` has shown, as a script has changed them."""
        return averaged

    def _update_by(self, rates: Rates, evaluate: Callable[[], float]) -> float:
        """Change the weights once, by an optimizer that computes the gradients itself, as often as it likes."""
        self.settle()
        norms: list[float] = []

        def evaluate_and_clip() -> float:
            with self._without_graph():
                self._averaged_gradients = None
                self._clear_gradients()
            loss = evaluate()
            with self._without_graph():
                gradients = self._exchange_gradients()
                norms.append(float(self._norm(gradients)))
                if not math.isfinite(norms[0]):
                    raise _FirstNotFinite
                self._clip(gradients, norms[-1], 1.0)
            return loss

        with suppress(_FirstNotFinite):
            self._apply_by(rates, evaluate_and_clip)
        self._end_forward()
        with self._without_graph():
            self._averaged_gradients = None
            self._count(norms[0])
            self._clear_gradients()
            self._seed_next()
        return norms[0]

    def skip(self) -> float:
        """See ``Optimizer.skip``."""
        self._end_forward()
        with self._without_graph():
            norm = float(self._norm(self._exchange_gradients()))
            self._averaged_gradients = None
            self._clear_gradients()
        return norm

    def _count(self, norm: float) -> None:
        """Count an update by its norm, and let the average and the ranges of rounded layers follow it."""
        if math.isfinite(norm):
            self.updates += 1
            self.skipped_in_a_row = 0
            self._scaler.good()
            if self._average is not None:
                self._average.follow(self.updates)
                if self._masking is not None:
                    self._masking.follow_average(self.ema())
            if self._ranges is not None:
                self._ranges.follow(self.updates)
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self._scaler.bad()
            if self._ranges is not None:
                self._ranges.begin(self.updates)

    # ------------------------------------------------------------------------- an update that the host does not read
    @property
    def can_be_late(self) -> bool:
        """Whether ``step_later`` can be used: nothing that the recipe asks for needs the norm in mid-update.

        A subclass outside of mtrain that changes a prompt method, and not the late one beside it, is never late.
        """
        recipe = self._recipe
        needs_it = recipe.native_optimizer, recipe.prune, recipe.quantise
        return all(setting is None for setting in needs_it) and all(
            _follows(type(self), late, prompt) for prompt, late in LATE_METHODS.items()
        )

    def settle(self) -> None:
        """Count the update of the last ``step_later``, if that was not done yet; waits for the device."""
        late, self._late = self._late, None
        if late is not None:
            norm = float(late()[0])
            with self._without_graph():
                self._count(norm)
                if not math.isfinite(norm):
                    self._set_rule_updates(self.updates)

    def _clip(self, gradients: Gradients, norm: float, scale: float) -> None:
        """Clip and remove the loss scale in one pass, which is skipped where the factor is 1."""
        # As torch rounds a number divided by a tensor: so float64 has the bits of clip_grad_norm_.
        factor = min(1.0, self._recipe.clip_norm * (1 / (norm + NORM_EPSILON))) / scale
        if factor != 1:
            self._multiply(gradients, factor)

    def _seed_next(self) -> None:
        """Seed the model's randomness (dropout) by (seed, rank, update), so that a resumed job repeats it.

        Models that share the generators are seeded by the loop alone, see ``Recipe.named``.
        """
        if not self._recipe.own_order and not self._recipe.named:
            update = self.updates + self.skipped + (self._late is not None)
            self._seed_generators(shard_seed(self._recipe.seed, self._recipe.data_rank(self._rank), update))

    def follow_ranges(self, ranges: Ranges | None) -> None:
        """Move the ranges of rounded layers with each update from now on; None: no layer is rounded."""
        self._ranges = ranges
        self.ranges_restored()

    def ranges_restored(self) -> None:
        """Follow weights that were loaded into the model."""
        if self._ranges is not None:
            with self._without_graph():
                self._ranges.follow_restored(self.updates)

    # ------------------------------------------------------------------------------------------------ the average
    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See ``Optimizer.averaged``."""
        self.settle()
        if self._average is not None:
            self._average.swap()
        restore_buffers = self._take_buffers_of_rank_0()
        try:
            yield
        finally:
            restore_buffers()
            if self._average is not None:
                self._average.swap()

    def restart_ema(self) -> None:
        """Restart the average at the model's current weights and buffers."""
        self.settle()
        if self._average is not None:
            self._average.restart()

    # --------------------------------------------------------------------------------------------------- counters
    def counters(self) -> dict[str, float]:
        """See ``State.counters``."""
        self.settle()
        return {
            "updates": float(self.updates),
            "skipped": float(self.skipped),
            "skipped_in_a_row": float(self.skipped_in_a_row),
            "loss_scale": self._scaler.scale,
            "loss_scale_age": float(self._scaler.age),
        }

    def set_counters(self, counters: dict[str, float]) -> None:
        """Restore ``counters``. A saved loss scale is used only if this recipe scales its loss."""
        self.settle()
        self.updates = int(counters.get("updates", 0))
        self.skipped = int(counters.get("skipped", 0))
        self.skipped_in_a_row = int(counters.get("skipped_in_a_row", 0))
        if self._scaler.active and counters.get("loss_scale", 1.0) > 1:
            self._scaler.scale = counters["loss_scale"]
            self._scaler.age = int(counters.get("loss_scale_age", 0))
        self._set_rule_updates(self.updates)
        self.ranges_restored()
        self._seed_next()

    # ------------------------------------------------------------------------------- primitives of the framework
    @abstractmethod
    def ema(self) -> dict[str, Any]:
        """Return the live averages by name of weight or buffer; empty without an average."""

    @abstractmethod
    def _forward_context(self) -> AbstractContextManager[object]:
        """Return a context for the forward pass: mixed precision."""

    @abstractmethod
    def _backward_context(self) -> AbstractContextManager[object]:
        """Return a context for the backward pass."""

    @abstractmethod
    def _without_graph(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is recorded for differentiation."""

    @abstractmethod
    def _differentiate(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Add the gradients of ``loss`` to those of the parameters; of several models, to those of this one alone."""

    @abstractmethod
    def _gradients(self) -> Gradients:
        """Return the exchanged gradients; a parameter that took no part in the update has none and is left alone."""

    def _by_name(self, gradients: Gradients) -> Mapping[str, Any]:
        """Return the gradients themselves by name of the parameter.

        Raises:
            SpecError: they are split over the ranks, or copies, so that a change would be lost.
        """
        raise SpecError(
            "optimizer.gradients: this backend has no whole gradients to show; use ddp, horovod or solo, or take the step with "
            "optimizer.update(loss)"
        )

    @abstractmethod
    def _norm(self, gradients: Gradients) -> Any:
        """Return the L2 norm over all elements of all gradients, a float64 number on the device, for which ``float`` waits."""

    @abstractmethod
    def _multiply(self, gradients: Gradients, factor: float) -> None:
        """Multiply all gradients in place."""

    @abstractmethod
    def _apply_rules(self, gradients: Gradients, rates: Rates, late_norm: Any = None) -> None:
        """Update parameters and moments; the gradients may be overwritten.

        ``late_norm``: the norm on the device, which changes nothing if it is not finite; None: it is.
        """

    def _apply_by(self, rates: Rates, evaluate: Callable[[], float]) -> None:
        """Update parameters and moments by a rule that calls ``evaluate`` for the loss, which leaves the gradients.

        Raises:
            SpecError: there is no such rule.
        """
        raise SpecError(NO_CLOSURE)

    @abstractmethod
    def _clip_late(self, gradients: Gradients, norm: Any) -> None:
        """Do what ``_clip`` does, by a norm on the device."""

    @abstractmethod
    def _send(self, norm: Any, numbers: Sequence[float], tensors: Sequence[Any]) -> Callable[[], Array]:
        """Start sending the norm, and the means over ranks of numbers and tensors, to the host.

        Returns a function that waits for them and returns them as one float64 vector.
        """

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Leave every parameter without a gradient."""

    @abstractmethod
    def _seed_generators(self, seed: int) -> None:
        """Seed the framework's random generators of this rank."""

    @abstractmethod
    def _copy_buffers(self) -> Callable[[], None]:
        """Copy the model's buffers; return a function that restores them."""

    @abstractmethod
    def _take_buffers_of_rank_0(self) -> Callable[[], None]:
        """Overwrite the model's buffers by rank 0's; return a function that restores this rank's own. Collective."""

    @abstractmethod
    def _set_rule_updates(self, updates: int) -> None:
        """Tell the update rules how many updates were taken before."""
