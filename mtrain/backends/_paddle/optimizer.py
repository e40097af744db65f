"""The Paddle engine's optimizer: the primitives of ``core.update.order.UpdateOrder`` on Paddle tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle import internals, precision, rules
from mtrain.backends._paddle.average import Average
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.flat import Flat
from mtrain.backends._paddle.native import NativeRule
from mtrain.core.interfaces import Array, Rates, Recipe
from mtrain.core.network.quantising import is_range
from mtrain.core.overriding import override
from mtrain.core.state.checks import aliases
from mtrain.core.update.masking import Masking
from mtrain.core.update.order import NORM_EPSILON, Exchange, UpdateOrder
from mtrain.core.update.recipe import assign, ema_shares

Gradients = Sequence[Sequence[rules.GradientPiece]]
"""The gradients of one update: by group with parameters, in pieces of neighbouring parameters."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter group of the recipe that has at least one parameter."""

    place: int
    """Number of the group in the recipe."""
    parameters: Flat
    rule: rules.Rule | None
    """None: the user's own optimizer updates the parameters."""

    def gradients(self) -> list[rules.GradientPiece]:
        """Return copies of the parameters' gradients."""
        return rules.pieces([parameter.grad for parameter in self.parameters.tensors.values()])


class PaddleOptimizer(UpdateOrder[Gradients]):
    """``core.interfaces.Optimizer`` on Paddle tensors.

    The parameters of a group lie in one piece of memory. If weights are averaged, so do all other float entries of the
    model's state.
    """

    _average: Average | None

    def __init__(self, model: Layer, recipe: Recipe, *, exchange: Exchange, collective: PaddleCollective) -> None:
        super().__init__(recipe, exchange=exchange, rank=collective.rank)
        trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
        self.groups: Sequence[Sequence[str]] = assign(trained, recipe.groups)
        self._collective = collective
        self._native: NativeRule | None = None
        if recipe.native_optimizer is not None:
            self._native = NativeRule(recipe.native_optimizer, model, trained)
        self._groups = [
            self._group(place, {name: trained[name] for name in names})
            for place, names in enumerate(self.groups)
            if names
        ]
        self._buffers = list(model.buffers())
        self._average = self._make_average(model) if recipe.ema_decay > 0 else None
        if recipe.prune is not None:
            groups = [{name: trained[name] for name in names} for names in self.groups]
            self._masking = PaddleMasking(recipe.prune, groups, model.state_dict().keys())
        self._places_checked = False
        self._seed_next()

    def _group(self, place: int, tensors: dict[str, Tensor]) -> _Group:
        parameters = Flat(tensors)
        rule = None
        if self._native is None:
            rule = rules.make(self._recipe.rule, parameters, self._recipe.groups[place][1])
        return _Group(place, parameters, rule)

    def _make_average(self, model: Layer) -> Average:
        parameters = [group.parameters for group in self._groups]
        trained = {name for flat in parameters for name in flat.tensors}
        # state_dict has the persistent entries only, as live tensors.
        entries = {name: x for name, x in model.state_dict().items() if x.is_floating_point() and not is_range(name)}
        further_names = aliases(entries)
        live = {name: x for name, x in entries.items() if name not in further_names}
        others: dict[Any, dict[str, Tensor]] = {}
        for name, tensor in live.items():
            if name not in trained:
                others.setdefault(tensor.dtype, {})[name] = tensor
        flats = [*parameters, *(Flat(tensors) for tensors in others.values())]
        return Average(list(live), flats, partial(ema_shares, self._recipe), further_names)

    # -------------------------------------------------------------------------- primitives, see ``UpdateOrder``
    @override
    def _forward_context(self) -> AbstractContextManager[object]:
        return precision.forward_context(self._recipe.precision)

    @override
    def _backward_context(self) -> AbstractContextManager[object]:
        return precision.backward_context(self._recipe.precision)

    @override
    def _without_graph(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = paddle.no_grad()
        return context

    @override
    def _differentiate(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        if not self._recipe.own_order:
            loss.backward(retain_graph=retain_graph)
            return
        own = [parameter for group in self._groups for parameter in group.parameters.tensors.values()]
        gradients = paddle.grad([loss], own, retain_graph=retain_graph, allow_unused=True)
        for parameter, gradient in zip(own, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @override
    def _gradients(self) -> Gradients:
        return [group.gradients() for group in self._groups]

    @override
    def _norm(self, gradients: Gradients) -> Tensor:
        return internals.norm([piece.grad for pieces in gradients for piece in pieces])

    @override
    def _multiply(self, gradients: Gradients, factor: float) -> None:
        for pieces in gradients:
            for piece in pieces:
                piece.grad.scale_(factor)

    @override
    def _clip_late(self, gradients: Gradients, norm: Tensor) -> None:
        limit = self._recipe.clip_norm
        factor = limit / (norm + NORM_EPSILON) if math.isfinite(limit) else paddle.ones_like(norm)
        factor = factor.clip(max=1.0) / self._scaler.scale
        for pieces in gradients:
            for piece in pieces:
                piece.grad = piece.grad * factor.astype(piece.grad.dtype)

    @override
    def _send(self, norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor]) -> Callable[[], Array]:
        return send_metrics(norm, numbers, tensors, collective=self._collective)

    @override
    def _apply_rules(self, gradients: Gradients, rates: Rates, late_norm: Tensor | None = None) -> None:
        if not self._places_checked:
            for group in self._groups:
                group.parameters.check()
            self._places_checked = True
        if self._native is not None:
            self._native.apply(gradients[0], learning_rate=rates.learning_rates[0])
            return
        for group, pieces in zip(self._groups, gradients, strict=True):
            if pieces and group.rule is not None:
                with undone_unless_finite(late_norm, [group.parameters, *group.rule.moments.values()]):
                    group.rule.apply(pieces, learning_rate=rates.learning_rates[group.place], momentum=rates.momentum)

    @override
    def _clear_gradients(self) -> None:
        for group in self._groups:
            for parameter in group.parameters.tensors.values():
                # False drops the gradient instead of setting it to zeros, which would count as one. As a keyword
                # argument Paddle ignores it.
                parameter.clear_gradient(False)  # noqa: FBT003

    @override
    def _seed_generators(self, seed: int) -> None:
        paddle.seed(seed)

    @override
    def _copy_buffers(self) -> Callable[[], None]:
        own_buffers = [buffer.clone() for buffer in self._buffers]

        def restore() -> None:
            for buffer, own in zip(self._buffers, own_buffers, strict=True):
                paddle.assign(own, buffer)

        return restore

    @override
    def _take_buffers_of_rank_0(self) -> Callable[[], None]:
        # Also with one rank: a user's module may change its buffers in evaluation mode, too.
        restore = self._copy_buffers()
        self._collective.broadcast_(self._buffers)
        return restore

    @override
    def _set_rule_updates(self, updates: int) -> None:
        for group in self._groups:
            if group.rule is not None:
                group.rule.set_updates(updates)

    # ------------------------------------------------------------------------------------------- state, by name
    def moments(self) -> dict[str, Tensor]:
        """Return the live moments under names ``<moment>/<parameter name>``."""
        masks: dict[str, Tensor] = {} if self._masking is None else self._masking.moments()
        if self._native is not None:
            return masks | self._native.named_moments()
        return masks | {
            f"{moment}/{name}": tensor
            for group in self._groups
            if group.rule is not None
            for moment, flat in group.rule.moments.items()
            for name, tensor in flat.tensors.items()
        }

    def expect_moments(self, saved: Mapping[str, Array]) -> None:
        """Hand saved moments to a user's own optimizer, which creates its state in its first update only."""
        if self._native is not None:
            self._native.expect(saved)

    def ema(self) -> dict[str, Tensor]:
        """Return the live averages by name of weight or buffer; for buffers, rank 0's averages are the job's."""
        return {} if self._average is None else self._average.tensors()


@contextmanager
def undone_unless_finite(norm: Tensor | None, flats: Sequence[Flat]) -> Iterator[None]:
    """Restore ``flats`` after the body, on the device, where ``norm`` is not finite; None: the body stands."""
    former = [] if norm is None else [flat.buffer.clone() for flat in flats]
    yield
    if norm is not None:
        finite = paddle.isfinite(norm)
        for flat, values in zip(flats, former, strict=True):
            # Paddle's kernels of SGD and Adam have no argument for it, unlike torch's.
            paddle.assign(paddle.where(finite, flat.buffer, values), flat.buffer)


def send_metrics(
    norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor], *, collective: PaddleCollective
) -> Callable[[], Array]:
    """Start sending ``norm``, and the means over ranks of ``numbers`` and ``tensors``, to the host.

    Returns:
        A function that waits for them and returns them as one float64 vector. On the CPU, several ranks exchange them
        at once over sockets, where gloo would give up after 30 s.
    """
    metrics = [tensor.detach().reshape([1]).astype("float64") for tensor in tensors]
    if collective.size > 1 and norm.place.is_cpu_place():
        own = np.concatenate([np.array(numbers, np.float64), *(metric.numpy() for metric in metrics)])
        exchanged = np.concatenate([norm.reshape([1]).numpy(), collective.all_reduce(own, "mean")])
        return lambda: exchanged
    mine = [paddle.full([1], number, "float64") for number in numbers]
    means = collective.all_reduce(paddle.concat([*mine, *metrics]), "mean")
    # The norm is equal on all ranks already; a mean of it could round.
    return internals.download(paddle.concat([norm.reshape([1]), means]))


class PaddleMasking(Masking[Tensor]):
    """See ``core.update.masking.Masking``."""

    @override
    def _ones(self, tensor: Tensor) -> Tensor:
        return paddle.ones_like(tensor).detach()

    @override
    def _choose(self, mask: Tensor, weight: Tensor, share: float) -> None:
        sizes = weight.detach().abs()
        count = int(share * sizes.size)
        if count:
            smallest, _ = paddle.kthvalue(sizes.flatten(), count)
            paddle.assign((sizes > smallest).astype(mask.dtype), mask)

    @override
    def _multiply(self, tensor: Tensor, mask: Tensor) -> None:
        paddle.assign(tensor * mask, tensor)

    @override
    def _soften(self, tensor: Tensor, amount: float) -> None:
        # Paddle's `clip` holds its limits as float32.
        limit = paddle.to_tensor(amount, dtype=tensor.dtype)
        paddle.assign(tensor - paddle.maximum(paddle.minimum(tensor, limit), -limit), tensor)
