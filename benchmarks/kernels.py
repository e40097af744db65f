"""Measure the CPU time per update with mtrain's own kernels and with the framework's alone, on the same batches.

One process with one thread trains one model of each kind, in turn: forward and backward pass, clipping, SGD, EMA. CPU
time of this process is counted, so that other work on the machine disturbs little; the metric is the median of the
pairs' ratios. There is no target.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH, RATE, WARMUP = 8, 1e-3, 2
KINDS = ("auto", "framework")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--updates", type=int, default=20, help="number of updates with each kind")
    parser.add_argument("--models", nargs="+", default=["yolov5n", "ppyoloe_s"])
    parser.add_argument("--framework", default="torch", choices=("torch", "paddle"))
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    rows = [measured(options.framework, model, options.updates) for model in options.models]
    options.json.write_text(json.dumps(rows))
    return 0


def measured(framework: str, model: str, updates: int) -> dict:
    """Return one row of the table of results, and print it."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        update = {kind: training(stack, framework, model, kind) for kind in KINDS}
        for number in range(WARMUP + updates):
            for kind in KINDS if number % 2 else reversed(KINDS):
                started = time.process_time()
                update[kind]()
                if number >= WARMUP:
                    times[kind].append((time.process_time() - started) * 1000)
    own, native = times["auto"], times["framework"]
    ratios = sorted(a / b for a, b in zip(own, native, strict=True))
    quarter = len(ratios) // 4
    print(
        f"{model} on {framework}: own {median(own):.0f} ms, framework's {median(native):.0f} ms, ratio {median(ratios):.3f} "
        f"(middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
    )
    name = f"update of {model} on {framework}, own kernels / the framework's"
    row = {"name": name, "ours": median(own), "peer": median(native), "ratio": median(ratios)}
    return row | {"unit": "ms of CPU", "target": None, "better": "lower"}


def training(stack: ExitStack, framework: str, model: str, kind: str) -> Callable[[], None]:
    """Return a function that trains one update."""
    from benchmarks import job
    from mtrain.backends.solo import Solo
    from mtrain.core.interfaces import Rates, Recipe, State

    session = stack.enter_context(Solo(Solo.Options(device="cpu", framework=framework)))
    job.bind(framework)
    options = {"weight_decay": 5e-4, "momentum": 0.937, "nesterov": 1.0}
    recipe = Recipe(
        rule="sgd",
        groups=(("", options),),
        micro_batch=BATCH,
        clip_norm=10.0,
        ema_decay=0.9999,
        channels_last=True,
        kernels=kind,
    )
    trained, optimizer = session.prepare(lambda: job.build(BATCH, model, session.collective), recipe)
    shapes = {name: x.shape for name, x in session.state(trained, optimizer).weights.items()}
    session.restore(trained, optimizer, State(weights=job.start_values(shapes, BATCH, model)))
    batches = session.batches(job.micro_batches(BATCH, seed=0))

    def update() -> None:
        with optimizer.micro_batch(last=True):
            optimizer.backward(trained(next(batches))["total"])
        optimizer.step(Rates(learning_rates=(RATE,)))

    return update


if __name__ == "__main__":
    sys.exit(main())
