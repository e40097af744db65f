"""The torch engine's optimizer: it scales the loss, exchanges, clips, updates and averages, in this order."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mtrain.backends._torch import device as devices
from mtrain.backends._torch import internals, precision, rules
from mtrain.backends._torch.average import Average, OtherWeights, nothing
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.native import CLOSURE_WORDS, Made, NativeRule
from mtrain.backends._torch.scripts.native_trial import check_resumes
from mtrain.core.interfaces import Array, Rates, Recipe
from mtrain.core.network.quantising import is_range
from mtrain.core.overriding import override
from mtrain.core.state.checks import aliases
from mtrain.core.update.masking import Masking
from mtrain.core.update.order import NO_CLOSURE, NORM_EPSILON, Exchange, UpdateOrder
from mtrain.core.update.recipe import assign, ema_shares, is_frozen
from mtrain.errors import SpecError


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one update, by group of the recipe."""

    places: list[list[int]]
    """Positions, in their group, of the parameters that have a gradient."""
    groups: list[list[Tensor]]

    @property
    def all(self) -> list[Tensor]:
        """All of them, in the order of the groups."""
        return [grad for group in self.groups for grad in group]


class TorchOptimizer(UpdateOrder[Gradients]):
    """``core.interfaces.Optimizer`` on torch tensors."""

    _average: Average | OtherWeights | None

    def __init__(
        self, model: nn.Module, recipe: Recipe, *, exchange: Exchange, collective: TorchCollective, device: torch.device
    ) -> None:
        super().__init__(recipe, exchange=exchange, rank=collective.rank)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.groups: Sequence[Sequence[str]] = assign(trained, recipe.groups)
        self._collective = collective
        self._device = device
        self._parameters = [[trained[name] for name in names] for names in self.groups]
        self._rules: list[rules.Rule | NativeRule] = self._make_rules(model, recipe)
        self._trained = trained
        self._buffers = list(model.buffers())
        entries = model.state_dict(keep_vars=True)
        live = {name: x for name, x in entries.items() if x.is_floating_point() and not is_range(name)}
        self._aliases = aliases(live)
        self._live = {name: x for name, x in live.items() if name not in self._aliases}
        self._average = self._make_average(self._live)
        self._take_modes()
        if recipe.prune is not None:
            groups = [dict(zip(*pair, strict=True)) for pair in zip(self.groups, self._parameters, strict=True)]
            self._masking = TorchMasking(recipe.prune, groups, model.state_dict().keys())
        self._layouts_checked = False
        self._seed_next()

    def _make_rules(self, model: nn.Module, recipe: Recipe) -> list[rules.Rule | NativeRule]:
        given: object = model
        if not isinstance(given, nn.Module):
            return []  # parts of a model, see ``sharded.Held``: the subclass makes the rules
        if recipe.native_optimizer is not None:
            assert isinstance(recipe.native_optimizer, Made)
            check_resumes(recipe.native_optimizer)
            rule = NativeRule(recipe.native_optimizer.optimizer, self._parameters[0])
            if rule.needs_closure and not recipe.own_order:
                raise SpecError(CLOSURE_WORDS)
            return [rule]
        return [
            rules.make(
                *(recipe.rule, parameters, options),
                is_matrix=[
                    p.dim() == 2 and not is_frozen(n, recipe.adamw) for n, p in zip(names, parameters, strict=True)
                ],
            )
            for names, parameters, (_, options) in zip(self.groups, self._parameters, recipe.groups, strict=True)
        ]

    def _make_average(self, live: Mapping[str, Tensor]) -> Average | None:
        """Make the average of ``live``: the persistent entries of the model, each tensor once."""
        if self._recipe.ema_decay <= 0:
            return None
        return Average(list(live), list(live.values()), partial(ema_shares, self._recipe))

    def _take_modes(self, publish: Callable[[], None] = nothing) -> None:
        """Evaluate with the weights that a script's optimizer has for it, if it has them."""
        modes = next((rule.modes for rule in self._rules if isinstance(rule, NativeRule)), None)
        if modes is None:
            return
        if self._average is not None:
            raise SpecError(
                "session.prepare: ema given with an optimizer that has weights of its own to evaluate with (its methods `train` and "
                "`eval`); leave ema out"
            )
        self._average = OtherWeights(list(self._live), list(self._live.values()), modes, publish)

    # -------------------------------------------------------------------------- primitives, see ``UpdateOrder``
    @override
    def _forward_context(self) -> AbstractContextManager[object]:
        return precision.forward_context(self._recipe.precision, self._device)

    @override
    def _backward_context(self) -> AbstractContextManager[object]:
        return precision.backward_context(self._recipe.precision, self._device)

    @override
    def _without_graph(self) -> AbstractContextManager[object]:
        return torch.no_grad()

    @override
    def _differentiate(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        own = [p for group in self._parameters for p in group] if self._recipe.own_order else None
        if before := getattr(self._exchange, "before_backward", None):
            before(loss)
        loss.backward(retain_graph=retain_graph or None, inputs=own)

    @override
    def _gradients(self) -> Gradients:
        places = [[i for i, p in enumerate(group) if p.grad is not None] for group in self._parameters]
        groups = [[_grad(group[i]) for i in used] for group, used in zip(self._parameters, places, strict=True)]
        if not self._layouts_checked:
            self._refuse_sparse(places, groups)
        return Gradients(places, groups)

    def _refuse_sparse(self, places: list[list[int]], gradients: list[list[Tensor]]) -> None:
        """Refuse sparse gradients, which torch's fused kernels and the exchange between ranks do not take.

        Raises:
            SpecError: A parameter has one; the message names it.
        """
        for names, used, group in zip(self.groups, places, gradients, strict=True):
            for place, gradient in zip(used, group, strict=True):
                if gradient.layout != torch.strided:
                    raise SpecError(
                        f"the gradient of {names[place]} is sparse, which mtrain does not train; build the layer with "
                        "sparse=False"
                    )

    @override
    def _by_name(self, gradients: Gradients) -> Mapping[str, Tensor]:
        return {
            names[place]: gradient
            for names, places, group in zip(self.groups, gradients.places, gradients.groups, strict=True)
            for place, gradient in zip(places, group, strict=True)
        }

    @override
    def _as_changed(self, averaged: Gradients) -> Gradients:
        return self._gradients()  # a script may have set others, ``parameter.grad = ...``

    @override
    def _gradients_of(self, loss: Tensor, *, retain_graph: bool) -> Mapping[str, Tensor]:
        former = dict(self.gradients())
        self._averaged_gradients = None
        with torch.no_grad():
            self._clear_gradients()
        self.backward(loss, retain_graph=retain_graph)
        own = {name: gradient.clone() for name, gradient in self.gradients().items()}
        with torch.no_grad():
            for name, gradient in former.items():
                parameter = self._trained[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._averaged_gradients = self._gradients()
        return {name: own[name] if name in own else torch.zeros_like(p) for name, p in self._trained.items()}

    @override
    def _norm(self, gradients: Gradients) -> Tensor:
        grads = gradients.all
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        # As ``clip_grad_norm_`` adds up: the norm of the norms of arrays, in their type.
        return torch.linalg.vector_norm(torch.stack(internals.norms(grads))).double()

    @override
    def _multiply(self, gradients: Gradients, factor: float) -> None:
        if tensors := gradients.all:
            internals.scale_(tensors, factor)

    @override
    def _clip_late(self, gradients: Gradients, norm: Tensor) -> None:
        factor = (
            self._recipe.clip_norm / (norm + NORM_EPSILON) if math.isfinite(self._recipe.clip_norm) else 1 + 0 * norm
        )
        factor = factor.clamp(max=1.0) / self._scaler.scale
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in gradients.all:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for dtype, tensors in by_type.items():
            internals.scale_by_(tensors, factor.to(dtype))

    @override
    def _send(self, norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor]) -> Callable[[], Array]:
        return send_metrics(norm, numbers, tensors, collective=self._collective)

    @override
    def _apply_rules(self, gradients: Gradients, rates: Rates, late_norm: Tensor | None = None) -> None:
        if not self._layouts_checked:
            self._match_layouts(gradients)
        skip = None if late_norm is None else (~torch.isfinite(late_norm)).float()
        for rule in self._rules:
            rule.leave_out(skip)
        for rule, places, group, learning_rate in zip(
            self._rules, gradients.places, gradients.groups, rates.learning_rates, strict=True
        ):
            if places:
                rule.apply(places, group, learning_rate=learning_rate, momentum=rates.momentum)

    @override
    def _apply_by(self, rates: Rates, evaluate: Callable[[], float]) -> None:
        (rule,) = self._rules if len(self._rules) == 1 else (None,)
        if not isinstance(rule, NativeRule):
            raise SpecError(NO_CLOSURE)
        rule.apply_by(evaluate, learning_rate=rates.learning_rates[0])

    def _match_layouts(self, gradients: Gradients) -> None:
        """Check that gradients have the strides of their parameters, as autograd promises and fused kernels need."""
        for group, places, group_grads in zip(self._parameters, gradients.places, gradients.groups, strict=True):
            for i, grad in zip(places, group_grads, strict=True):
                if not _same_layout(group[i], grad):
                    raise AssertionError(f"gradient strides {grad.stride()} under a parameter of {group[i].stride()}")
        self._layouts_checked = True

    @override
    def _clear_gradients(self) -> None:
        if self._recipe.own_order and self._recipe.precision in precision.HALF:
            torch.clear_autocast_cache()  # of weights that were just changed; the model may be called again before autocast ends
        for group in self._parameters:
            for parameter in group:
                parameter.grad = None

    @override
    def _seed_generators(self, seed: int) -> None:
        devices.seed_generators(self._device, seed)

    @override
    def _copy_buffers(self) -> Callable[[], None]:
        own_buffers = [buffer.clone() for buffer in self._buffers]

        def restore() -> None:
            for buffer, own in zip(self._buffers, own_buffers, strict=True):
                buffer.copy_(own)

        return restore

    @override
    def _take_buffers_of_rank_0(self) -> Callable[[], None]:
        # Also with one rank: a user's module may change its buffers in evaluation mode, too.
        restore = self._copy_buffers()
        self._collective.broadcast_(self._buffers)
        return restore

    @override
    def _set_rule_updates(self, updates: int) -> None:
        for rule in self._rules:
            rule.set_updates(updates)

    # ------------------------------------------------------------------------------------------- state, by name
    def moments(self) -> dict[str, Tensor]:
        """Return the live moments under names ``<moment>/<parameter name>``."""
        masks: dict[str, Tensor] = {} if self._masking is None else self._masking.moments()
        return masks | {
            f"{moment}/{name}": tensor
            for names, rule in zip(self.groups, self._rules, strict=True)
            for moment, tensors in rule.moments.items()
            for name, tensor in zip(names, tensors, strict=True)
            if tensor is not None
        }

    def expect_moments(self, saved: Mapping[str, Array]) -> None:
        """Make room for saved moments, which a user's own optimizer creates in its first update only."""
        for names, rule in zip(self.groups, self._rules, strict=True):
            if isinstance(rule, NativeRule):
                rule.expect(names, saved)

    def ema(self) -> dict[str, Tensor]:
        """Return the live averages by name of weight or buffer; for buffers, rank 0's averages are the job's."""
        self.settle()
        if self._average is None:
            return {}
        averages = dict(zip(self._average.names, self._average.shadow, strict=True))
        return averages | {alias: averages[name] for alias, name in self._aliases.items()}


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _same_layout(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether both order their elements alike in memory; strides of axes of length 1 do not count."""
    pairs = zip(parameter.shape, parameter.stride(), grad.stride(), strict=True)
    return all(length <= 1 or a == b for length, a, b in pairs)


def send_metrics(
    norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor], *, collective: TorchCollective
) -> Callable[[], Array]:
    """Start sending ``norm``, and the means over ranks of ``numbers`` and ``tensors``, to the host.

    Returns:
        A function that waits for them and returns them as one float64 vector.
    """
    device = norm.device
    parts = [_upload(numbers, device), *(tensor.detach().reshape(1).double() for tensor in tensors)]
    means = collective.all_reduce(torch.cat(parts), "mean")
    # The norm is equal on all ranks already; a mean of it could round.
    return _download(torch.cat([norm.reshape(1), means]))


def _upload(numbers: Sequence[float], device: torch.device) -> Tensor:
    on_cuda = device.type == "cuda"
    # From pageable memory the copy would wait until the device has come to it.
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=on_cuda).to(device, non_blocking=True)


def _download(vector: Tensor) -> Callable[[], Array]:
    if vector.device.type != "cuda":
        return vector.numpy
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Array:
        copied.synchronize()
        return host.numpy()

    return read


class TorchMasking(Masking[Tensor]):
    """See ``core.update.masking.Masking``."""

    @override
    def _ones(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, requires_grad=False)

    @override
    def _choose(self, mask: Tensor, weight: Tensor, share: float) -> None:
        sizes = weight.detach().abs()
        count = int(share * sizes.numel())
        if count:
            mask.copy_(sizes > sizes.flatten().kthvalue(count).values)

    @override
    def _multiply(self, tensor: Tensor, mask: Tensor) -> None:
        tensor.mul_(mask)

    @override
    def _soften(self, tensor: Tensor, amount: float) -> None:
        tensor.sub_(tensor.clamp(-amount, amount))
