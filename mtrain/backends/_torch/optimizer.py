"""The torch engine's optimizer: it scales the loss, exchanges, clips, updates and averages, in this order."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._torch import precision, rules
from mtrain.backends._torch.average import Average
from mtrain.backends._torch.collective import TorchCollective
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


class TorchOptimizer:
    """``core.interfaces.Optimizer`` on torch tensors."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, *, exchange: Exchange, collective: TorchCollective, device: torch.device
    ) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.groups: Sequence[Sequence[str]] = assign(trained, recipe.groups)
        self._recipe = recipe
        self._exchange = exchange
        self._collective = collective
        self._device = device
        self._parameters = [[trained[name] for name in names] for names in self.groups]
        self._rules = [
            rules.make(recipe.rule, parameters, options)
            for parameters, (_, options) in zip(self._parameters, recipe.groups, strict=True)
        ]
        self._buffers = list(model.buffers())
        self._average = _make_average(model, recipe)
        self._scaler = LossScaler(recipe.precision)
        self._layouts_checked = False
        self.updates = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._seed_next()

    # ------------------------------------------------------------------------------------------------- one update
    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """See ``Optimizer.micro_batch``."""
        with self._exchange.during(last=last), precision.forward_context(self._recipe.precision, self._device):
            yield

    def backward(self, loss: Tensor) -> None:
        """See ``Optimizer.backward``."""
        with precision.backward_context(self._recipe.precision, self._device):
            factor = self._scaler.scale / self._recipe.accumulate
            (loss if factor == 1 else loss * factor).backward()

    @torch.no_grad()
    def step(self, rates: Rates) -> float:
        """See ``Optimizer.step``."""
        self._exchange.finish()
        # A parameter that took no part in this update has no gradient and is left alone.
        used_places = [[i for i, p in enumerate(group) if p.grad is not None] for group in self._parameters]
        grads = [[_grad(group[i]) for i in places] for group, places in zip(self._parameters, used_places, strict=True)]
        all_grads = [grad for group in grads for grad in group]
        norm = self._norm(all_grads) / self._scaler.scale
        if math.isfinite(norm):
            self._scale_(all_grads, norm)
            self._apply(used_places, grads, rates)
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self._scaler.bad()
        for group in self._parameters:
            for parameter in group:
                parameter.grad = None
        self._seed_next()
        return norm

    def _norm(self, grads: list[Tensor]) -> float:
        """Return the global L2 norm of the gradients before clipping, still multiplied by the loss scale."""
        return global_norm(grads)

    def _scale_(self, grads: list[Tensor], norm: float) -> None:
        """Clip the gradients and divide by the loss scale in a single pass, which is skipped where the factor is 1."""
        clip = min(1.0, self._recipe.clip_norm / (norm + 1e-6))
        factor = clip / self._scaler.scale
        if factor != 1 and grads:
            torch._foreach_mul_(grads, factor)

    def _apply(self, used_places: list[list[int]], grads: list[list[Tensor]], rates: Rates) -> None:
        if not self._layouts_checked:
            self._match_layouts(used_places, grads)
        for rule, places, group, rate in zip(self._rules, used_places, grads, rates.rates, strict=True):
            if places:
                rule.apply(places, group, rate=rate, momentum=rates.momentum)
        self.updates += 1
        self.skipped_in_a_row = 0
        self._scaler.good()
        if self._average is not None:
            self._average.follow(self.updates)

    def _match_layouts(self, used_places: list[list[int]], grads: list[list[Tensor]]) -> None:
        """Check that gradients have the strides of their parameters, as autograd promises and fused kernels need."""
        for group, places, group_grads in zip(self._parameters, used_places, grads, strict=True):
            for i, grad in zip(places, group_grads, strict=True):
                if not _same_layout(group[i], grad):
                    raise AssertionError(f"gradient strides {grad.stride()} under a parameter of {group[i].stride()}")
        self._layouts_checked = True

    def _seed_next(self) -> None:
        """Seed the model's randomness (dropout) by (seed, rank, update), so that a resumed job repeats it."""
        key = [self._recipe.seed, self._collective.rank, self.updates + self.skipped]
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
        # torch.manual_seed also formats a call stack for every device type that is not in use: 0.3 ms per update.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

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
                buffer.copy_(own)
            if self._average is not None:
                self._average.swap()

    # ------------------------------------------------------------------------------------------- state, by name
    def moments(self) -> dict[str, Tensor]:
        """Return the live moments under names ``<moment>/<parameter name>``."""
        return {
            f"{moment}/{name}": tensor
            for names, rule in zip(self.groups, self._rules, strict=True)
            for moment, tensors in rule.moments.items()
            for name, tensor in zip(names, tensors, strict=True)
        }

    def ema(self) -> dict[str, Tensor]:
        """Return the live averages by name of weight or buffer; for buffers, rank 0's averages are the job's."""
        return {} if self._average is None else dict(zip(self._average.names, self._average.shadow, strict=True))

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
        for rule in self._rules:
            rule.set_updates(self.updates)
        self._seed_next()


def global_norm(grads: Sequence[Tensor]) -> float:
    """Return the L2 norm over all elements of all gradients, as ``clip_grad_norm_`` does; waits for the device."""
    if not grads:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads)))))


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _same_layout(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether both order their elements alike in memory; strides of axes of length 1 do not count."""
    pairs = zip(parameter.shape, parameter.stride(), grad.stride(), strict=True)
    return all(length <= 1 or a == b for length, a, b in pairs)


def _make_average(model: nn.Module, recipe: Recipe) -> Average | None:
    if recipe.ema_decay <= 0:
        return None
    # state_dict has the persistent entries only; keep_vars makes them the live tensors, in model order.
    live = {name: x for name, x in model.state_dict(keep_vars=True).items() if x.is_floating_point()}
    return Average(list(live), list(live.values()), partial(ema_shares, recipe))
