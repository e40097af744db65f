"""Trains the small network through a backend, the way a job does, and compares what two jobs learnt.

A fault can be planted from outside, in the same way for every backend: the comparison must notice each of them.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from mtrain.core.interfaces import Backend, Rates, Recipe, State
from mtrain.core.sampler import Shuffled, rank_share
from tests.contract.convnet import SAMPLES, build, data
from tests.framework import FRAMEWORKS, Framework

GLOBAL_BATCH, UPDATES, SEED = 12, 6, 3
TOLERANCE = 1e-12
GROUPS = ((r"\.bias$", {"weight_decay": 0.0}), (r"bn\d\.weight$", {"weight_decay": 0.0}), ("", {"weight_decay": 5e-4}))
SGD = {"momentum": 0.9, "nesterov": 1.0}
Fault = Literal["none", "undivided", "sum", "clip-first", "shuffle", "start"]
FAULTS: tuple[Fault, ...] = ("undivided", "sum", "clip-first", "shuffle", "start")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training; equal ones but for (size, accumulate, fault) must learn the same."""

    batchnorm: Literal["frozen", "synced"] = "frozen"
    accumulate: int = 1
    clip_norm: float = 4.0
    rule: Literal["sgd", "adam", "adamw"] = "sgd"
    fault: Fault = "none"

    @property
    def key(self) -> str:
        """Name of the case in files."""
        return "-".join(str(x) for x in asdict(self).values())

    def recipe(self, size: int) -> Recipe:
        """The recipe of this case, in float64."""
        options = SGD if self.rule == "sgd" else {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        return Recipe(
            rule=self.rule,
            groups=tuple((match, {**options, **more}) for match, more in GROUPS),
            frozen=(r"bn\d\.weight$",) if self.batchnorm == "frozen" else (),
            micro_batch=GLOBAL_BATCH // size // self.accumulate,
            accumulate=self.accumulate,
            precision="fp64",
            clip_norm=self.clip_norm,
            ema_decay=0.99,
            ema_ramp=5.0,
            sync_batchnorm=self.batchnorm == "synced",
            seed=SEED,
        )


def start_weights() -> dict[str, np.ndarray]:
    """Start values of every entry, float64, BatchNorm statistics included; keyed by name, equal on every framework."""
    values = {}
    for name, tensor in build().state_dict().items():
        generator = np.random.default_rng([11, *name.encode()])
        shape = tuple(tensor.shape)
        if name.endswith("num_batches_tracked"):
            values[name] = np.zeros(shape, np.int64)
        elif name.endswith("running_var") or (".weight" in name and "bn" in name):
            values[name] = generator.uniform(0.5, 1.5, shape)
        else:
            values[name] = generator.normal(0, 0.3, shape)
    return values


def micro_batches(case: Case, *, rank: int, size: int, updates: int = UPDATES) -> Iterator[dict[str, np.ndarray]]:
    """Micro batches of one rank, as numpy."""
    pictures, labels = data()
    seed = SEED + rank if case.fault == "shuffle" else SEED
    order = Shuffled(SAMPLES, global_batch=GLOBAL_BATCH, seed=seed)
    for update in range(updates):
        epoch, position = divmod(update, order.updates_per_epoch)
        # Every other update is loud, so that some are clipped and others not.
        loudness = 3.0 if update % 2 else 0.3
        indices = order.global_batch_indices(epoch, position)
        for share in rank_share(indices, rank=rank, size=size, accumulate=case.accumulate):
            yield {"images": loudness * pictures[share], "labels": labels[share], "index": share}


def rates(update: int) -> Rates:
    """Rates that differ between groups and updates, and a momentum that warms up."""
    factor = 1 - update / 20
    momentum = 0.5 + 0.1 * update if update < 3 else None
    return Rates(rates=(0.1 * factor, 0.05 * factor, 0.05 * factor), momentum=momentum)


def train(backend: Backend, case: Case, *, updates: int = UPDATES) -> dict[str, np.ndarray]:
    """What a job learns: norms, mean losses, and the final state, as one flat dict of arrays."""
    collective, framework = backend.collective, FRAMEWORKS[backend.framework]()
    model, optimizer = backend.prepare(build, case.recipe(collective.size))
    backend.restore(model, optimizer, State(weights=start_weights()))
    if case.fault == "start" and collective.rank == 1:
        name, first = next(iter(framework.parameters(inner(model)).items()))
        framework.load(inner(model), {name: 1.001 * framework.ops.to_numpy(first)})
    batches = backend.batches(micro_batches(case, rank=collective.rank, size=collective.size, updates=updates))
    norms, losses = [], []
    for update in range(updates):
        total = 0.0
        for i in range(case.accumulate):
            with optimizer.micro_batch(last=i == case.accumulate - 1):
                loss = model(next(batches))["total"]
                optimizer.backward(loss * faulty_factor(case, framework, model, loss, collective.size))
            total += float(framework.ops.to_numpy(loss)) / case.accumulate
        norms.append(optimizer.step(rates(update)))
        losses.append(float(collective.all_reduce(np.array([total]), "mean")[0]))
    return flat(backend.state(model, optimizer)) | {"norms": np.array(norms), "losses": np.array(losses)}


def inner(model: Any) -> Any:
    """The network itself, without what a backend wrapped around it."""
    return getattr(model, "module", getattr(model, "_layers", model))


def faulty_factor(case: Case, framework: Framework, model: Any, loss: Any, size: int) -> float:
    """What the planted fault multiplies the loss with; 1 without one."""
    if case.fault == "undivided":
        return float(case.accumulate)
    if case.fault == "sum":
        return float(size)
    if case.fault == "clip-first":
        parameters = list(framework.parameters(inner(model)).values())
        grads = framework.gradients(loss, parameters, again=True)
        norm = math.sqrt(sum(float(np.square(g).sum()) for g in grads))
        return min(1.0, case.clip_norm / (norm + 1e-6))
    return 1.0


def flat(state: State) -> dict[str, np.ndarray]:
    """All arrays of a state under one roof."""
    parts = {"weights": state.weights, "ema": state.ema, "moments": state.moments}
    return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


def differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of each array, relative to the largest magnitude in it."""
    assert a.keys() == b.keys()
    return {name: float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), 1e-3)) for name in a}


def disagreements(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names of arrays that differ by more than the tolerance; empty: the jobs learnt the same."""
    return [f"{name}: {x:.1e}" for name, x in differences(a, b).items() if not x <= TOLERANCE]
