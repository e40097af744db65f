"""Train the small network through a backend like a job does, and compare the results of two jobs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from mtrain.core import nn, ops
from mtrain.core.interfaces import (
    Array,
    Batch,
    Imitation,
    Module,
    Optimizer,
    Precision,
    Pruning,
    Quantise,
    RankSession,
    Rates,
    Recipe,
    State,
)
from mtrain.core.samples.sampler import Shuffled, rank_share
from mtrain_kit.convnet import SAMPLES, build, data, start_weights

GLOBAL_BATCH, UPDATES, SEED = 24, 6, 3
TOLERANCE = 1e-12
BOUNDS: Mapping[Precision, float] = {"fp64": TOLERANCE, "fp32": 2e-5}
"""Largest relative difference between two jobs that differ in the order of additions alone."""
GROUPS = ((r"\.bias$", {"weight_decay": 0.0}), (r"bn\d\.weight$", {"weight_decay": 0.0}), ("", {"weight_decay": 5e-4}))
SPARSITY = 0.5
"""Share of each array that ``Case.masked`` leaves as zeros."""
SGD = {"momentum": 0.9, "nesterov": 1.0}
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
OPTIONS = {"sgd": SGD, "adam": ADAM, "adamw": ADAM, "rmsprop": {"momentum": 0.9, "beta2": 0.99, "eps": 1.0}}
RECOMPUTED = (r"^conv1$", r"^bn\d$", r"^head$")
"""Submodules of the small network that a case with ``recomputed`` recomputes; those between them keep their results."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training; cases that differ in size and ``accumulate`` only must learn the same."""

    batchnorm: Literal["frozen", "synced"] = "frozen"
    accumulate: int = 1
    clip_norm: float = 4.0
    rule: Literal["sgd", "adam", "adamw", "rmsprop"] = "sgd"
    precision: Precision = "fp64"
    quantised: bool = False
    taught: bool = False
    """Whether the network imitates a trained one."""
    masked: bool = False
    """Whether small weights become zeros, and the scales of BatchNorms shrink."""
    recomputed: bool = False

    @property
    def key(self) -> str:
        """Return the name of the case in files."""
        return "-".join(str(x) for x in asdict(self).values())

    @property
    def reference(self) -> "Case":
        """Return the case that one rank trains for comparison: with frozen BatchNorm accumulation makes no
        difference."""
        return replace(self, accumulate=1) if self.batchnorm == "frozen" else self

    def recipe(self, size: int) -> Recipe:
        """Return the recipe of this case for ``size`` ranks."""
        options = OPTIONS[self.rule]
        return Recipe(
            rule=self.rule,
            groups=tuple((match, {**options, **more}) for match, more in GROUPS),
            frozen=(r"bn\d\.weight$",) if self.batchnorm == "frozen" else (),
            micro_batch=GLOBAL_BATCH // size // self.accumulate,
            accumulate=self.accumulate,
            precision=self.precision,
            clip_norm=self.clip_norm,
            ema_decay=0.99,
            ema_ramp=5.0,
            sync_batchnorm=self.batchnorm == "synced",
            quantise=Quantise(start=1, freeze=4) if self.quantised else None,
            recompute=RECOMPUTED if self.recomputed else (),
            prune=Pruning(sparsity=SPARSITY, norm_l1=0.02) if self.masked else None,
            seed=SEED,
        )


def start_training(session: RankSession, recipe: Recipe, *, taught: bool = False) -> tuple[Module, Optimizer]:
    """Return the network and its optimizer, at the start weights; ``taught``: it imitates another one."""
    built: list[Module] = []

    def build_and_note() -> Module:
        built.append(build())
        return built[0]

    model, optimizer = session.prepare(build_and_note, recipe)
    if taught:  # as ``rank.spec.teaching.attach`` does: the teacher is given to the module that ``build`` has made
        built[0].imitation = Imitation(teacher=nn.frozen(build(), teacher_weights, like=built[0]))
    session.restore(model, optimizer, State(weights=weights_for(recipe.precision)))
    return model, optimizer


def weights_for(precision: Precision) -> dict[str, Array]:
    """Return the start weights in the type in which ``precision`` keeps them."""
    return {
        name: array if precision == "fp64" or array.dtype.kind != "f" else array.astype(np.float32)
        for name, array in start_weights().items()
    }


def teacher_weights(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of the trained network that ``Case.taught`` imitates: others than the start weights."""
    start = start_weights()
    return {
        name: (start[name] * (1.5 if array.dtype.kind == "f" else 1)).astype(array.dtype)
        for name, array in state.items()
    }


def micro_batches(
    case: Case, *, rank: int, size: int, start: int = 0, updates: int = UPDATES
) -> Iterator[dict[str, Array]]:
    """Yield the micro batches of one rank from update ``start`` up to ``updates``, as numpy arrays."""
    images, labels = data()
    order = Shuffled(SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED)
    for update in range(start, updates):
        epoch, position = divmod(update, order.updates_per_epoch)
        # Scale up every other update, so that some gradients are clipped and others are not.
        loudness = 3.0 if update % 2 else 0.3
        indices = order.global_batch_indices(epoch, position)
        for share in rank_share(indices, rank=rank, size=size, accumulate=case.accumulate):
            yield {"images": loudness * images[share], "labels": labels[share], "index": share}


def batches_of(session: RankSession, case: Case, *, start: int = 0, updates: int = UPDATES) -> Iterator[Batch]:
    """Return this rank's micro batches of ``case``, through the session."""
    c = session.collective
    return session.batches(micro_batches(case, rank=c.rank, size=c.size, start=start, updates=updates))


def rates(update: int, *, masked: bool = False) -> Rates:
    """Return learning rates that differ between groups and updates, a momentum that warms up, and when masks are chosen."""
    factor = 1 - update / 20
    momentum = 0.5 + 0.1 * update if update < 3 else None
    sparsity = {1: SPARSITY / 2, 3: SPARSITY}.get(update) if masked else None
    return Rates(learning_rates=(0.1 * factor, 0.05 * factor, 0.05 * factor), momentum=momentum, sparsity=sparsity)


def update_once(
    session: RankSession, model: Module, optimizer: Optimizer, batches: Iterator[Batch], case: Case, update: int
) -> tuple[float, float]:
    """Run one update. Return (norm, this rank's mean loss)."""
    total = 0.0
    for i in range(case.accumulate):
        with optimizer.micro_batch(last=i == case.accumulate - 1):
            loss = model(next(batches))["total"]
            optimizer.backward(loss)
        total += float(ops.to_numpy(loss)) / case.accumulate
    return optimizer.step(rates(update, masked=case.masked)), total


def train(session: RankSession, case: Case, *, updates: int = UPDATES) -> dict[str, Array]:
    """Train and return norms, mean losses and the final state, as one flat dict of arrays."""
    model, optimizer = start_training(session, case.recipe(session.collective.size), taught=case.taught)
    batches = batches_of(session, case, updates=updates)
    norms, losses = [], []
    for update in range(updates):
        norm, loss = update_once(session, model, optimizer, batches, case, update)
        norms.append(norm)
        losses.append(float(session.collective.all_reduce(np.array([loss]), "mean")[0]))
    return flat(session.state(model, optimizer)) | {"norms": np.array(norms), "losses": np.array(losses)}


def flat(state: State) -> dict[str, Array]:
    """Return all arrays of a state in one dict: ``weights/<name>``, ``ema/<name>``, ``moments/<moment>/<name>``."""
    parts = {"weights": state.weights, "ema": state.ema, "moments": state.moments}
    return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


def differences(a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest difference of each array, relative to the largest magnitude in that of ``a``; inf if it is not
    in both with one shape, or not a number."""
    return {name: _difference(a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])}


def _difference(a: Array | None, b: Array | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    difference = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-3)
    return float("inf") if np.isnan(difference) else float(difference)


def differing_names(a: Mapping[str, Array], b: Mapping[str, Array]) -> list[str]:
    """Names of arrays that are not equal bit for bit, those that only one has included."""
    names: Sequence[str] = list(dict.fromkeys([*a, *b]))
    return [name for name in names if name not in a or name not in b or not _identical(a[name], b[name])]


def _identical(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def image_batch(count: int) -> dict[str, Any]:
    """The first ``count`` images, as a micro batch that is the same on every rank."""
    images, labels = data()
    return {"images": images[:count], "labels": labels[:count], "index": np.arange(count)}
