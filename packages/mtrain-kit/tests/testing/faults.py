"""Sessions on torch with one planted fault each, and the check that must notice it."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mtrain.core.interfaces import Pruning, Rates, Recipe, State


class Faulty:
    """A session that passes everything on; a fault overrides one method."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.collective = self.with_collective(inside.collective)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def with_collective(self, collective: Any) -> Any:
        return collective

    def with_recipe(self, recipe: Recipe) -> Recipe:
        return recipe

    def with_optimizer(self, model: Any, optimizer: Any, recipe: Recipe) -> Any:
        return optimizer

    def prepare(self, build: Any, recipe: Recipe) -> tuple[Any, Any]:
        model, optimizer = self.inside.prepare(build, self.with_recipe(recipe))
        return model, self.with_optimizer(model, optimizer, recipe)

    def state(self, model: Any, optimizer: Any) -> State:
        return self.inside.state(model, getattr(optimizer, "inside", optimizer))

    def restore(self, model: Any, optimizer: Any, state: State) -> None:
        self.inside.restore(model, getattr(optimizer, "inside", optimizer), state)


class Passing:
    """Passes everything on; ``overrides`` replaces methods, which are given the object inside."""

    def __init__(self, inside: Any, **overrides: Callable[..., Any]) -> None:
        self.inside = inside
        self._overrides = overrides

    def __getattr__(self, name: str) -> Any:
        if name in self._overrides:
            return lambda *args, **kwargs: self._overrides[name](self.inside, *args, **kwargs)
        return getattr(self.inside, name)


def collective(**overrides: Callable[..., Any]) -> type[Faulty]:
    class WithCollective(Faulty):
        def with_collective(self, inside: Any) -> Any:
            return Passing(inside, **overrides)

    return WithCollective


def recipe(**fields: Any) -> type[Faulty]:
    class WithRecipe(Faulty):
        def with_recipe(self, recipe: Recipe) -> Recipe:
            return replace(recipe, **fields)

    return WithRecipe


def optimizer(make: Callable[[Any, Recipe, int], dict[str, Callable[..., Any]]]) -> type[Faulty]:
    """``make`` (model, recipe, size) gives the methods to replace."""

    class WithOptimizer(Faulty):
        def with_optimizer(self, model: Any, inside: Any, recipe: Recipe) -> Any:
            return Passing(inside, **make(model, recipe, self.inside.collective.size))

    return WithOptimizer


def loss_times(factor: Callable[[Recipe, int], float]) -> type[Faulty]:
    return optimizer(
        lambda model, recipe, size: {"backward": lambda inside, loss: inside.backward(loss * factor(recipe, size))}
    )


def saved(change: Callable[[State], State]) -> type[Faulty]:
    class WithState(Faulty):
        def state(self, model: Any, optimizer: Any) -> State:
            return change(super().state(model, optimizer))

    return WithState


def restored(change: Callable[[State], State]) -> type[Faulty]:
    class WithRestore(Faulty):
        def restore(self, model: Any, optimizer: Any, state: State) -> None:
            super().restore(model, optimizer, change(state))

    return WithRestore


class SameRank(Faulty):
    def with_collective(self, inside: Any) -> Any:
        wrapped = Passing(inside)
        wrapped.rank = 0
        return wrapped


class Swapped(Faulty):
    def batches(self, loader: Any) -> Iterator[Any]:
        first, second, *others = [*self.inside.batches(loader)]
        yield from (second, first, *others)


class Shortened(Faulty):
    def batches(self, loader: Any) -> Iterator[Any]:
        actual = [*self.inside.batches(loader)]
        yield from actual[:-1] if len(actual) > 1 else actual


class Backwards(Faulty):
    def infer(self, model: Any, batch: Any) -> dict[str, Any]:
        return {name: x[::-1] for name, x in self.inside.infer(model, batch).items()}


class OwnStart(Faulty):
    @torch.no_grad()
    def restore(self, model: Any, optimizer: Any, state: State) -> None:
        super().restore(model, optimizer, state)
        if self.collective.rank == self.collective.size - 1:
            next(iter(model.parameters())).mul_(1.001)


class Unchecked(Faulty):
    """The weights that a rank is given are taken as they are, though ranks differ."""

    @torch.no_grad()
    def restore(self, model: Any, optimizer: Any, state: State) -> None:
        mine = state.weights["head.bias"]
        same = self.collective.all_gather({**state.weights})[0]
        super().restore(model, optimizer, replace(state, weights=same))
        model.module.head.bias.copy_(torch.from_numpy(np.array(mine)))


class Inexact(Faulty):
    """torch's own BatchNorm, which is inexact in channels-last layout, takes the place of mtrain's."""

    def prepare(self, build: Any, recipe: Recipe) -> tuple[Any, Any]:
        model, optimizer = super().prepare(build, recipe)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.forward = partial(torch.nn.BatchNorm2d.forward, module)
        return model, optimizer


class Copied(Faulty):
    """The module that is trained is a copy of the one that the caller has built, so a teacher given to that is lost."""

    def prepare(self, build: Any, recipe: Recipe) -> tuple[Any, Any]:
        return super().prepare(lambda: copy.deepcopy(build()), recipe)


class UnmaskedAverage(Faulty):
    """Averaged weights keep what masks have taken from the weights."""

    def with_optimizer(self, model: Any, optimizer: Any, recipe: Recipe) -> Any:
        if recipe.prune is not None:
            optimizer._masking.follow_average = lambda averages: None
        return optimizer


class MovesTwice(Faulty):
    """Running statistics move once more where blocks are recomputed."""

    def with_optimizer(self, model: Any, optimizer: Any, recipe: Recipe) -> Any:
        if not recipe.recompute:
            return optimizer

        @torch.no_grad()
        def step(inside: Any, rates: Any) -> float:
            norm = inside.step(rates)
            for name, buffer in model.named_buffers():
                if "running_mean" in name:
                    buffer.mul_(0.9)
            return norm

        return Passing(optimizer, step=step)


class Views(Faulty):
    def state(self, model: Any, optimizer: Any) -> State:
        actual = super().state(model, optimizer)
        return replace(actual, weights={name: x.detach().numpy() for name, x in model.module.state_dict().items()})


def clipped_norm(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    return {"step": lambda inside, rates: min(inside.step(rates), recipe.clip_norm)}


def clip_each(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    """Every rank clips its own gradient of every micro batch."""

    def backward(inside: Any, loss: Any) -> None:
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        inside.backward(loss * min(1.0, recipe.clip_norm / (norm + 1e-6)))

    return {"backward": backward}


def exchanges_each(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    """Gradients travel in every micro batch; what is learnt is the same."""
    return {"micro_batch": lambda inside, *, last: inside.micro_batch(last=True)}


def no_warmup(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    """A planted fault: the momentum of an update is always the group's, regardless of the schedule."""
    return {"step": lambda inside, rates: inside.step(Rates(learning_rates=rates.learning_rates))}


def applies_nan(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    def step(inside: Any, rates: Any) -> float:
        norm = inside.step(rates)
        if not math.isfinite(norm):
            with torch.no_grad():
                next(iter(model.parameters())).mul_(0.99)
        return norm

    return {"step": step}


def hides_nan(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    return {"step": lambda inside, rates: norm if math.isfinite(norm := inside.step(rates)) else 0.0}


def unsettled(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    def step_later(inside: Any, *given: Any) -> Any:
        read = inside.step_later(*given)
        inside._late = None  # nobody will count it
        return read

    return {"step_later": step_later}


def never_averaged(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    return {"averaged": lambda inside: nullcontext()}


def stays_averaged(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    @contextmanager
    def averaged(inside: Any) -> Iterator[None]:
        with inside.averaged():
            yield
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1 + 1e-12)

    return {"averaged": averaged}


def own_buffers(model: Any, recipe: Recipe, size: int) -> dict[str, Callable[..., Any]]:
    @contextmanager
    def averaged(inside: Any) -> Iterator[None]:
        mine = [buffer.clone() for buffer in model.buffers()]
        with inside.averaged():
            for buffer, own in zip(model.buffers(), mine, strict=True):
                buffer.copy_(own)
            yield

    return {"averaged": averaged}


def kept_graph(inside: Any, x: Any, op: str) -> Any:
    actual = inside.all_reduce(x, op)
    return actual if isinstance(x, np.ndarray) else actual + 0 * x


def in_place(inside: Any, x: Any, op: str) -> Any:
    actual = inside.all_reduce(x, op)
    (x if isinstance(x, np.ndarray) else x.detach())[...] = actual
    return actual


FAULTS: dict[str, tuple[type[Faulty], str]] = {
    "all ranks are rank 0": (SameRank, "collective.place"),
    "mean is sum": (
        collective(all_reduce=lambda inside, x, op: inside.all_reduce(x, "sum" if op == "mean" else op)),
        "collective.reduces",
    ),
    "reductions keep the graph": (collective(all_reduce=kept_graph), "collective.reduces"),
    "reductions work in place": (collective(all_reduce=in_place), "collective.reduces"),
    "gathers in the order of arrival": (
        collective(all_gather=lambda inside, value: inside.all_gather(value)[::-1]),
        "collective.gathers",
    ),
    "sums differ in the last bit": (
        collective(all_reduce=lambda inside, x, op: inside.all_reduce(x, op) * (1 + inside.rank * 3e-16)),
        "collective.agrees",
    ),
    "micro batches out of order": (Swapped, "data.batches"),
    "the last micro batch is lost": (Shortened, "data.batches"),
    "one rank starts elsewhere": (OwnStart, "start.equal"),
    "unequal weights are not noticed": (Unchecked, "start.equal"),
    "gradients are summed": (loss_times(lambda recipe, size: size), "learns.sgd"),
    "each micro batch is clipped": (optimizer(clip_each), "learns.sgd"),
    "momentum does not warm up": (optimizer(no_warmup), "learns.sgd"),
    "micro batches are summed": (loss_times(lambda recipe, size: recipe.accumulate), "learns.accumulation"),
    "statistics of each rank": (recipe(sync_batchnorm=False), "learns.sync_batchnorm"),
    "micro batches are summed, synchronised": (
        loss_times(lambda recipe, size: recipe.accumulate),
        "learns.sync_batchnorm_accumulation",
    ),
    "a default limit": (recipe(clip_norm=1.0), "learns.unclipped"),
    "nothing is rounded": (recipe(quantise=None), "learns.quantised"),
    "a copy of the network is trained": (Copied, "learns.taught"),
    "nothing is masked": (recipe(prune=None), "learns.masked"),
    "masks without the penalty": (recipe(prune=Pruning(sparsity=0.5)), "learns.masked"),
    "masks are left out of the average": (UnmaskedAverage, "learns.masked"),
    "adam for adamw": (recipe(rule="adam"), "learns.adamw"),
    "adamw for adam": (recipe(rule="adamw"), "learns.adam"),
    "no average": (recipe(ema_decay=0.0), "learns.sgd"),
    "no average of rmsprop": (recipe(ema_decay=0.0), "learns.rmsprop"),
    "statistics move twice where blocks are recomputed": (MovesTwice, "recompute.same_bits"),
    "gradients travel in every micro batch": (optimizer(exchanges_each), "traffic.once"),
    "an inexact BatchNorm": (Inexact, "accuracy.first_update"),
    "the norm behind clipping": (optimizer(clipped_norm), "clip.norm"),
    "nothing is clipped": (recipe(clip_norm=math.inf), "clip.norm"),
    "everything is clipped": (recipe(clip_norm=0.5), "clip.norm"),
    "a broken update is applied": (optimizer(applies_nan), "step.skips"),
    "a broken update is not told": (optimizer(hides_nan), "step.skips"),
    "late updates are not counted": (optimizer(unsettled), "step.later"),
    "averaged is empty": (optimizer(never_averaged), "average.restores"),
    "averaged leaves a trace": (optimizer(stays_averaged), "average.restores"),
    "every rank keeps its buffers": (optimizer(own_buffers), "average.restores"),
    "a state of views": (Views, "state.whole"),
    "names with a prefix": (
        saved(lambda s: replace(s, weights={f"module.{name}": x for name, x in s.weights.items()})),
        "state.whole",
    ),
    "a state without moments": (saved(lambda s: replace(s, moments={})), "state.whole"),
    "moments do not come back": (restored(lambda s: replace(s, moments={})), "state.continues"),
    "counters do not come back": (restored(lambda s: replace(s, counters={})), "state.from_solo"),
    "averages do not come back": (restored(lambda s: replace(s, ema={})), "state.from_solo"),
    "the last rank is left out": (
        collective(all_gather=lambda inside, value: [*inside.all_gather(value)[:-1], inside.all_gather(value)[0]]),
        "evaluation.once",
    ),
    "outputs out of order": (Backwards, "evaluation.once"),
}
"""Fault -> the session that has it, and the id of the check that must notice."""
