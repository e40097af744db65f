"""The Paddle engine's optimizer: it scales the loss, exchanges, clips, updates and averages, in this order."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle import kernels, precision, rules
from mtrain.backends._paddle.average import Average
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.flat import Flat
from mtrain.core.interfaces import Rates, Recipe
from mtrain.core.loss_scale import LossScaler
from mtrain.core.recipe import assign, ema_shares


class Exchange(Protocol):
    """How gradients become their mean over ranks, which is the only difference between backends on this engine."""

    def during(self, *, last: bool) -> AbstractContextManager[object]:
        """Return a context for forward and backward of a micro batch; ``last``: the last one of its update."""
        ...

    def finish(self) -> None:
        """Complete the exchange after the last backward pass: when this returns, gradients are averaged."""
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter group of the recipe that has at least one parameter."""

    place: int
    """Number of the group in the recipe."""
    parameters: Flat
    rule: rules.Rule

    def gradients(self) -> list[rules.Piece]:
        """Return copies of the parameters' gradients."""
        return rules.pieces([parameter.grad for parameter in self.parameters.tensors.values()])


class PaddleOptimizer:
    """``core.interfaces.Optimizer`` on Paddle tensors.

    The parameters of a group lie in one piece of memory. If weights are averaged, so do all other float entries of the
    model's state.
    """

    def __init__(self, model: Layer, recipe: Recipe, *, exchange: Exchange, collective: PaddleCollective) -> None:
        trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
        self.groups: Sequence[Sequence[str]] = assign(trained, recipe.groups)
        self._recipe = recipe
        self._exchange = exchange
        self._collective = collective
        self._groups = []
        for place, names in enumerate(self.groups):
            if names:
                parameters = Flat({name: trained[name] for name in names})
                rule = rules.make(recipe.rule, parameters, recipe.groups[place][1])
                self._groups.append(_Group(place, parameters, rule))
        self._buffers = list(model.buffers())
        self._average = self._make_average(model) if recipe.ema_decay > 0 else None
        self._scaler = LossScaler(recipe.precision)
        self._places_checked = False
        self.updates = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._seed_next()

    def _make_average(self, model: Layer) -> Average:
        parameters = [group.parameters for group in self._groups]
        trained = {name for flat in parameters for name in flat.tensors}
        # state_dict has the persistent entries only, as live tensors.
        live = {name: x for name, x in model.state_dict().items() if x.is_floating_point()}
        others: dict[Any, dict[str, Tensor]] = {}
        for name, tensor in live.items():
            if name not in trained:
                others.setdefault(tensor.dtype, {})[name] = tensor
        flats = [*parameters, *(Flat(tensors) for tensors in others.values())]
        return Average(list(live), flats, partial(ema_shares, self._recipe))

    # ------------------------------------------------------------------------------------------------- one update
    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """See ``Optimizer.micro_batch``."""
        with self._exchange.during(last=last), precision.forward_context(self._recipe.precision):
            yield

    def backward(self, loss: Tensor) -> None:
        """See ``Optimizer.backward``."""
        with precision.backward_context(self._recipe.precision):
            factor = self._scaler.scale / self._recipe.accumulate
            (loss if factor == 1 else loss * factor).backward()

    @paddle.no_grad()
    def step(self, rates: Rates) -> float:
        """See ``Optimizer.step``."""
        self._exchange.finish()
        group_pieces = [group.gradients() for group in self._groups]
        grads = [piece.grad for pieces in group_pieces for piece in pieces]
        norm = kernels.norm(grads) / self._scaler.scale
        if math.isfinite(norm):
            self._scale_(grads, norm)
            self._apply(group_pieces, rates)
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self._scaler.bad()
        for group in self._groups:
            for parameter in group.parameters.tensors.values():
                # False drops the gradient instead of setting it to zeros, which would count as one. As a keyword
                # argument Paddle ignores it.
                parameter.clear_gradient(False)  # noqa: FBT003
        self._seed_next()
        return norm

    def _scale_(self, grads: Sequence[Tensor], norm: float) -> None:
        """Clip the gradients and divide by the loss scale in a single pass, which is skipped where the factor is 1."""
        clip = min(1.0, self._recipe.clip_norm / (norm + 1e-6))
        factor = clip / self._scaler.scale
        if factor != 1:
            for grad in grads:
                grad.scale_(factor)

    def _apply(self, group_pieces: Sequence[Sequence[rules.Piece]], rates: Rates) -> None:
        if not self._places_checked:
            for group in self._groups:
                group.parameters.check()
            self._places_checked = True
        for group, pieces in zip(self._groups, group_pieces, strict=True):
            if pieces:
                group.rule.apply(pieces, rate=rates.rates[group.place], momentum=rates.momentum)
        self.updates += 1
        self.skipped_in_a_row = 0
        self._scaler.good()
        if self._average is not None:
            self._average.follow(self.updates)

    def _seed_next(self) -> None:
        """Seed the model's randomness (dropout) by (seed, rank, update), so that a resumed job repeats it."""
        key = [self._recipe.seed, self._collective.rank, self.updates + self.skipped]
        paddle.seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))

    # ------------------------------------------------------------------------------------------------ the average
    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See ``Optimizer.averaged``."""
        if self._average is not None:
            self._average.swap()
        own_buffers = [buffer.clone() for buffer in self._buffers] if self._collective.size > 1 else []
        self._collective.broadcast_(self._buffers)
        try:
            yield
        finally:
            for buffer, own in zip(self._buffers, own_buffers, strict=bool(own_buffers)):
                paddle.assign(own, buffer)
            if self._average is not None:
                self._average.swap()

    # ------------------------------------------------------------------------------------------- state, by name
    def moments(self) -> dict[str, Tensor]:
        """Return the live moments under names ``<moment>/<parameter name>``."""
        return {
            f"{moment}/{name}": tensor
            for group in self._groups
            for moment, flat in group.rule.moments.items()
            for name, tensor in flat.tensors.items()
        }

    def ema(self) -> dict[str, Tensor]:
        """Return the live averages by name of weight or buffer; for buffers, rank 0's averages are the job's."""
        return {} if self._average is None else self._average.tensors()

    def restart_ema(self) -> None:
        """Restart the average at the model's current weights and buffers."""
        if self._average is not None:
            self._average.restart()

    def counters(self) -> dict[str, float]:
        """See ``State.counters``."""
        return {
            "updates": float(self.updates),
            "skipped": float(self.skipped),
            "skipped_in_a_row": float(self.skipped_in_a_row),
            "loss_scale": self._scaler.scale,
            "loss_scale_age": float(self._scaler.age),
        }

    def set_counters(self, counters: dict[str, float]) -> None:
        """Restore ``counters``. A saved loss scale is used only if this recipe scales its loss."""
        self.updates = int(counters.get("updates", 0))
        self.skipped = int(counters.get("skipped", 0))
        self.skipped_in_a_row = int(counters.get("skipped_in_a_row", 0))
        if self._scaler.active and counters.get("loss_scale", 1.0) > 1:
            self._scaler.scale = counters["loss_scale"]
            self._scaler.age = int(counters.get("loss_scale_age", 0))
        for group in self._groups:
            group.rule.set_updates(self.updates)
        self._seed_next()
