"""Milliseconds per update of torch and Paddle, side by side: YOLOv5n and PP-YOLOE-s at 320 px, batch 8, one process.

Each framework runs with the best settings known for it on CPU, one or two threads, as mtrain's ``solo`` starts it. A
round measures all four combinations once, each in its own process; metrics are medians over the rounds. There is no
target: the table shows the cost of the choice of a framework.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH = 8
MODELS = ("yolov5n", "ppyoloe_s")
FRAMEWORKS = ("torch", "paddle")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=3, metavar=("FRAMEWORK", "MODEL", "OUT"), help="run as a measured process")
    options = parser.parse_args()
    if options.measure:
        return measure(*options.measure, updates=options.updates)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for model in MODELS:
            for framework in FRAMEWORKS:
                milliseconds = measured(framework, model, options)
                times.setdefault((framework, model), []).append(milliseconds)
    rows = [row(model, times) for model in MODELS]
    for each in rows:
        print(f"{each['name']}: {each['ours']:.0f} ms / {each['peer']:.0f} ms, ratio {each['ratio']:.2f}")
    options.json.write_text(json.dumps(rows))
    return 0


def row(model: str, times: dict[tuple[str, str], list[float]]) -> dict:
    paddle, torch = times["paddle", model], times["torch", model]
    return {
        "name": f"update of {model}, Paddle / torch",
        "ours": median(paddle),
        "peer": median(torch),
        "unit": "ms",
        "ratio": median(a / b for a, b in zip(paddle, torch, strict=True)),
        "target": None,
        "better": "lower",
    }


def measured(framework: str, model: str, options: argparse.Namespace) -> float:
    """Return the milliseconds per update, measured in a separate process."""
    from mtrain.system.launch_options import LaunchOptions
    from mtrain.system.placement import rank_environment

    env = {**os.environ, **rank_environment(LaunchOptions(python=sys.executable, threads=options.threads))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        argv = [sys.executable, __file__, "--measure", framework, model, str(out), "--updates", str(options.updates)]
        subprocess.run(argv, env=env, check=True)
        return median(json.loads(out.read_text()))


def measure(framework: str, model: str, out: str, *, updates: int) -> int:
    """Measure forward pass, backward pass and step in this process."""
    from benchmarks import job
    from mtrain.backends.solo import Solo
    from mtrain.core.interfaces import Rates, Recipe, State

    with Solo(Solo.Options(device="cpu", framework=framework)) as session:
        job.bind(framework)
        options = {"weight_decay": 5e-4, "momentum": 0.937, "nesterov": 1.0}
        recipe = Recipe(
            rule="sgd", groups=(("", options),), micro_batch=BATCH, clip_norm=10.0, ema_decay=0.9999, channels_last=True
        )
        trained, optimizer = session.prepare(lambda: job.build(BATCH, model, session.collective), recipe)
        shapes = {name: x.shape for name, x in session.state(trained, optimizer).weights.items()}
        session.restore(trained, optimizer, State(weights=job.start_values(shapes, BATCH, model)))
        batches = session.batches(job.micro_batches(BATCH, seed=0))
        times = []
        for _ in range(updates + 2):
            started = time.perf_counter()
            with optimizer.micro_batch(last=True):
                optimizer.backward(trained(next(batches))["total"])
            optimizer.step(Rates(learning_rates=(0.01,)))
            times.append((time.perf_counter() - started) * 1000)
        Path(out).write_text(json.dumps(times[2:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
