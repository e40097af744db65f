"""What one rank of the contract tests runs: all cases in one process group, results of rank 0 into a folder.

``python -m tests.contract.ranks BACKEND OUT``, started by whatever starts the backend's ranks.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import plugins
from mtrain.core.binding import bind
from mtrain.core.collective import barrier, broadcast, mean
from mtrain.core.errors import TrainingError
from mtrain.core.interfaces import Backend, State
from tests.contract import training
from tests.contract.cases import EQUAL, FAULTY
from tests.contract.convnet import build
from tests.contract.training import Case
from tests.framework import FRAMEWORKS


def main(name: str, out: Path) -> None:
    """Run everything."""
    loaded: Any = plugins.load("backends", name)
    with loaded(loaded.Options(device="cpu")) as backend:
        bind(backend.nn, backend.ops)
        FRAMEWORKS[backend.framework]().one_thread()
        for case in (*EQUAL, *(FAULTY if backend.collective.size > 1 else ())):
            learnt = training.train(backend, case)
            if backend.collective.rank == 0:
                np.savez(out / f"{case.key}.npz", **learnt)
        facts = {check.__name__: check(backend) for check in CHECKS}
        everyone = backend.collective.all_gather(facts)
        if backend.collective.rank == 0:
            (out / "facts.json").write_text(json.dumps(everyone))
        rank = backend.collective.rank
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    (out / f"threads-{rank}.json").write_text(json.dumps(threads))


def collectives(backend: Backend) -> dict[str, object]:
    """Reductions and gathers of (rank + 1)."""
    c = backend.collective
    mine = float(c.rank + 1)
    barrier(c)
    tensor = FRAMEWORKS[backend.framework]().variable([mine, -mine])
    return {
        "size": c.size,
        "sum": c.all_reduce(tensor, "sum").tolist(),
        "gradient": carries_gradient(c.all_reduce(tensor, "sum")),
        "max": c.all_reduce(np.array([mine, -mine]), "max").tolist(),
        "mean": mean(c, {"x": mine})["x"],
        "untouched": tensor.tolist(),
        "gathered": c.all_gather({"rank": c.rank}),
        "broadcast": broadcast(c, c.rank + 10),
    }


def nonfinite(backend: Backend) -> dict[str, object]:
    """One rank's gradient is not a number in the third of four updates."""
    c, case = backend.collective, Case()
    model, optimizer = backend.prepare(build, case.recipe(c.size))
    backend.restore(model, optimizer, State(weights=training.start_weights()))
    batches = backend.batches(training.micro_batches(case, rank=c.rank, size=c.size))
    norms, kept = [], True
    for update in range(4):
        before = training.flat(backend.state(model, optimizer))
        with optimizer.micro_batch(last=True):
            loss = model(next(batches))["total"]
            poisoned = update == 2 and c.rank == c.size - 1
            optimizer.backward(loss * math.nan if poisoned else loss)
        norms.append(optimizer.step(training.rates(update)))
        if update == 2:
            kept = identical(before, training.flat(backend.state(model, optimizer)))
    counters = backend.state(model, optimizer).counters
    return {"finite": [math.isfinite(x) for x in norms], "kept": kept, "counters": counters}


def averaging(backend: Backend) -> dict[str, object]:
    """Inside ``averaged`` every rank holds rank 0's averages; afterwards each its own weights, bit for bit."""
    c, case = backend.collective, Case(batchnorm="synced")
    # Unsynced statistics differ between ranks: the averages of buffers must be rank 0's.
    recipe = case.recipe(c.size).__class__(**{**_fields(case.recipe(c.size)), "sync_batchnorm": False})
    model, optimizer = backend.prepare(build, recipe)
    backend.restore(model, optimizer, State(weights=training.start_weights()))
    batches = backend.batches(training.micro_batches(case, rank=c.rank, size=c.size))
    for update in range(3):
        with optimizer.micro_batch(last=True):
            optimizer.backward(model(next(batches))["total"])
        optimizer.step(training.rates(update))
    own = tensors(backend, model)
    with optimizer.averaged():
        inside = tensors(backend, model)
    after = tensors(backend, model)
    expected = backend.state(model, optimizer).ema
    everyone = c.all_gather({name: inside[name] for name in expected})
    return {
        "restored": identical(own, after),
        "changed": not identical({k: own[k] for k in expected}, {k: inside[k] for k in expected}),
        "equal": all(identical(everyone[0], other) for other in everyone),
        "expected": identical({name: inside[name] for name in expected}, expected),
        "buffers_differed": any(
            not np.array_equal(a["bn1.running_mean"], c.all_gather(own)[0]["bn1.running_mean"])
            for a in c.all_gather(own)
        ),
    }


def resuming(backend: Backend, accumulate: int = 2) -> dict[str, object]:
    """Six updates at once, and three, a fresh model and optimizer from the state, three more."""
    case = Case(batchnorm="synced", accumulate=accumulate)
    c = backend.collective
    found = []
    for cut in (None, 3):
        model, optimizer = backend.prepare(build, case.recipe(c.size))
        backend.restore(model, optimizer, State(weights=training.start_weights()))
        batches = backend.batches(training.micro_batches(case, rank=c.rank, size=c.size))
        for update in range(6):
            if update == cut:
                saved = backend.state(model, optimizer)
                model, optimizer = backend.prepare(build, case.recipe(c.size))
                backend.restore(model, optimizer, saved)
                again = backend.state(model, optimizer)
                same = identical(training.flat(saved), training.flat(again)) and saved.counters == again.counters
            for i in range(accumulate):
                with optimizer.micro_batch(last=i == accumulate - 1):
                    optimizer.backward(model(next(batches))["total"])
            optimizer.step(training.rates(update))
        found.append(backend.state(model, optimizer))
    return {
        "round_trip": same,
        "continued": identical(training.flat(found[0]), training.flat(found[1])),
        "counters": found[0].counters == found[1].counters,
        "moments": len(found[0].moments),
    }


def resuming_without_accumulation(backend: Backend) -> dict[str, object]:
    """The same where DDP's graph is static: it settles its order of addition later."""
    return resuming(backend, accumulate=1)


def unequal_start(backend: Backend) -> str:
    """The error when the last rank is given other weights."""
    model, optimizer = backend.prepare(build, Case().recipe(backend.collective.size))
    weights = training.start_weights()
    if backend.collective.rank == backend.collective.size - 1:
        weights["head.bias"] = weights["head.bias"] + 1e-9
    try:
        backend.restore(model, optimizer, State(weights=weights))
    except TrainingError as error:
        return str(error)
    return ""


CHECKS: tuple[Callable[[Backend], object], ...] = (
    collectives,
    nonfinite,
    averaging,
    resuming,
    resuming_without_accumulation,
    unequal_start,
)


def tensors(backend: Backend, model: Any) -> dict[str, np.ndarray]:
    """Everything that a model holds, copied."""
    framework = FRAMEWORKS[backend.framework]()
    state = framework.state(training.inner(model))
    return {name: np.array(framework.ops.to_numpy(tensor)) for name, tensor in state.items()}


def carries_gradient(x: Any) -> bool:
    """Whether a tensor has a place in a graph."""
    return x.requires_grad if hasattr(x, "requires_grad") else not x.stop_gradient


def identical(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def _fields(recipe: Any) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
