"""A job without ranks: the recipe's mathematics on four small arrays, as traces. Anything of it can be planted
wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain.compare.traces import trace_of, with_recipe
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Recipe, State
from mtrain.core.state.trace import Tracer
from mtrain.core.update.recipe import ema_shares
from mtrain.records.history import History
from mtrain_trace.reading import Trace

SHAPES = {"conv.weight": (40, 9), "head.weight": (30, 5), "bn.weight": (25,), "head.bias": (30,)}
GROUPS = (("bn.weight", "head.bias"), ("conv.weight", "head.weight"))
RATES = (0.02, 0.02)
RECIPE = Recipe(
    rule="sgd",
    groups=(
        (r"bn|bias", {"weight_decay": 0.0, "momentum": 0.9, "nesterov": 1.0}),
        ("", {"weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0}),
    ),
    micro_batch=2,
    accumulate=4,
    clip_norm=10.0,
    ema_decay=0.99,
    ema_ramp=5.0,
)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The deviations of one job; the defaults change nothing."""

    recipe: Recipe = RECIPE
    start: float = 0.0
    """Added to every weight."""
    other_samples_from: int | None = None
    loss_factor: float = 1.0
    gradient_factor: float = 1.0
    """Before the norm is taken."""
    applied_factor: float = 1.0
    """After it was clipped."""
    learning_rate_factor: float = 1.0
    noise: float = 0.0
    """Relative, on the gradient."""
    buffer_momentum: float = 0.1
    drift_at: int | None = None
    momenta: Mapping[int, float] = field(default_factory=dict)
    told_momenta: Mapping[int, float] | None = None
    """What the records say of them; None: what is used."""


class TwoRanks(OneRank):
    """Gathers this rank's value and one that differs where ``drifted``."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.drifted = False

    def all_gather(self, value: Any) -> list[Any]:
        return [value, ["drifted"] if self.drifted else value]


def run(planted: Planted = Planted(), *, updates: int = 12, asked: Recipe = RECIPE) -> Trace:
    """Train; norms rise over the job, so that clipping begins in the middle of it. ``asked``: the recipe of its spec."""
    recipe, generator = planted.recipe, np.random.default_rng(0)
    weights = {name: (generator.standard_normal(shape) + planted.start).astype("f4") for name, shape in SHAPES.items()}
    moments = {name: np.zeros(shape, "f4") for name, shape in SHAPES.items()}
    squares = {name: np.zeros(shape, "f4") for name, shape in SHAPES.items()}
    buffers = {"bn.mean": np.zeros(25, "f4"), "bn.count": np.zeros((), "i8")}
    ema = {name: x.copy() for name, x in (weights | buffers).items() if x.dtype.kind == "f"}
    collective = TwoRanks()

    def state() -> State:
        held = {f"momentum/{name}": x for name, x in moments.items()}
        if recipe.rule != "sgd":
            held = {f"mean/{name}": x for name, x in moments.items()} | {
                f"square/{name}": x for name, x in squares.items()
            }
        return State(weights=weights | buffers, ema=ema, moments=held)

    tracer = Tracer(collective, GROUPS, state, accumulate=1)
    history = History()
    history.add({"kind": "start", "update": 0, "trace": tracer.look()})
    for u in range(updates):
        collective.drifted = planted.drift_at is not None and u >= planted.drift_at
        batch = np.random.default_rng(
            [7, u, int(planted.other_samples_from is not None and u >= planted.other_samples_from)]
        )
        seen = {name: batch.standard_normal(shape) for name, shape in SHAPES.items()}
        loss = planted.loss_factor * sum(float((weights[name] * x).sum()) for name, x in seen.items())
        grads = {name: (planted.gradient_factor * x * (1 + u) / 10).astype("f4") for name, x in seen.items()}
        grads = {
            name: x * (1 + planted.noise * batch.standard_normal(x.shape)).astype("f4") for name, x in grads.items()
        }
        norm = math.sqrt(sum(float((x.astype("f8") ** 2).sum()) for x in grads.values()))
        clip = planted.applied_factor * min(1.0, recipe.clip_norm / (norm + 1e-6))
        for group, (_, options) in zip(GROUPS, recipe.groups, strict=True):
            learning_rate = planted.learning_rate_factor * RATES[0]
            for name in group:
                moved = _step(
                    recipe, options, weights[name], clip * grads[name], (moments, squares, name), planted.momenta.get(u)
                )
                weights[name] = (weights[name] - learning_rate * moved).astype("f4")
        buffers["bn.mean"] = (
            (1 - planted.buffer_momentum) * buffers["bn.mean"] + planted.buffer_momentum * seen["bn.weight"]
        ).astype("f4")
        keep, take = ema_shares(recipe, u + 1)
        ema = {name: (keep * x + take * (weights | buffers)[name]).astype("f4") for name, x in ema.items()}
        tracer._batch_digests.append(str(seen["bn.weight"][0]))
        history.add(
            {
                "kind": "update",
                "update": u,
                "losses": {"total": loss},
                "gradient_norm": norm,
                "learning_rates": list(RATES),
                "trace": tracer.after_update(),
            }
            | {
                "momentum": (planted.told_momenta or planted.momenta).get(u),
                "update_seconds": 0.1,
                "time": float(u),
                "data_wait_share": 0.0,
            }
        )
    return with_recipe(trace_of(history), asked, ranks=2)


def _step(
    recipe: Recipe, options: Mapping[str, float], weight: Any, grad: Any, values: tuple, momentum: float | None
) -> Any:
    moments, squares, name = values
    if recipe.rule == "sgd":
        momentum = options["momentum"] if momentum is None else momentum
        added = grad + options["weight_decay"] * weight
        moments[name] = (momentum * moments[name] + added).astype("f4")
        return added + momentum * moments[name] if options["nesterov"] else moments[name]
    decay = options["weight_decay"]
    if recipe.rule == "adam":
        grad, decay = grad + decay * weight, 0.0
    beta1 = options["beta1"] if momentum is None else momentum
    moments[name] = (beta1 * moments[name] + (1 - beta1) * grad).astype("f4")
    squares[name] = (0.999 * squares[name] + 0.001 * grad**2).astype("f4")
    return moments[name] / (np.sqrt(squares[name]) + 1e-8) + decay * weight


def with_options(**options: float) -> Recipe:
    """The recipe with other options in every group."""
    return replace(RECIPE, groups=tuple((match, {**given, **options}) for match, given in RECIPE.groups))
