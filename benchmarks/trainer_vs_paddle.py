"""Milliseconds per update: the Trainer on backend fleet against a hand-written Paddle loop. Target: ratio <= 1.02.

Both train YOLOv5n at 320 px, global batch 8 on 2 ranks, SGD with nesterov, three groups, clipping, EMA, the same model and the
same batches. The peer is what a good programmer writes: ``fleet.distributed_model``, ``paddle.optimizer.Momentum`` with
``ClipGradByGlobalNorm``, EMA over a ``state_dict``. Both live in the same two processes and take turns in blocks of a few
updates; ratios are taken block by block.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RANKS, BATCH, RATE = 2, 8, 0.01
GROUPS = ((r"\.bias$", 0.0), (r"\.bn\.weight$", 0.0), ("", 5e-4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--updates", type=int, default=4, help="per block")
    parser.add_argument("--rank", action="store_true", help="this is a rank")
    options = parser.parse_args()
    if options.rank:
        return run(options)
    return start(sys.argv[1:])


def start(arguments: list[str]) -> int:
    """Two ranks by mtrain's own plan for backend fleet."""
    from mtrain.core.interfaces import Host
    from mtrain.core.placement import free_port
    from mtrain.launchers.environment import caller, cleaned
    from mtrain.launchers.fleetrun import Fleetrun

    launcher = Fleetrun(Fleetrun.Options(python=sys.executable, master_port=free_port(), interface="lo"))
    [command] = launcher.plan([__file__, "--rank", *arguments], [Host(address="127.0.0.1", slots=RANKS)], RANKS)
    env = {**cleaned(caller()), **command.env, "PYTHONPATH": str(ROOT)}
    argv = [str(word) for word in command.argv]
    return subprocess.run(argv, env=env, cwd=os.environ.get("TMPDIR", "/tmp"), check=False).returncode


def run(options: argparse.Namespace) -> int:
    """One rank: both loops in turns."""
    from benchmarks import job
    from mtrain.backends.fleet import Fleet

    job.bind("paddle")
    with Fleet(Fleet.Options(device="cpu")) as backend:
        ours, peer = Ours(backend), Peer(backend)
        for loop in (ours, peer):
            loop.updates(3)
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for block in range(options.blocks):
            order = [("ours", ours), ("peer", peer)]
            for name, loop in order if block % 2 else order[::-1]:
                started = time.perf_counter()
                loop.updates(options.updates)
                times[name].append((time.perf_counter() - started) / options.updates * 1000)
        gap = ours.difference(peer)  # collective: every rank
        if backend.collective.rank == 0:
            report(times, options.json, gap=gap)
    return 0


def report(times: dict[str, list[float]], target: Path, *, gap: float) -> None:
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    row = {
        "name": "update, Trainer / hand-written Paddle",
        "ours": median(times["ours"]),
        "peer": median(times["peer"]),
        "unit": "ms",
        "ratio": median(ratios),
        "target": 1.02,
        "better": "lower",
    }
    quarters = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-len(ratios) // 4]
    text = (
        f"{row['ours']:.0f} ms / {row['peer']:.0f} ms: ratio {row['ratio']:.3f}, middle half of the blocks {quarters[0]:.3f} to "
        f"{quarters[1]:.3f}\nlargest difference of a weight after the same updates: {gap:.1e}"
    )
    print(text, flush=True)
    target.write_text(json.dumps([row]))


class Ours:
    """The Trainer with a record of every update."""

    def __init__(self, backend: Any) -> None:
        from benchmarks import job
        from benchmarks.trainer_vs_ddp import Endless
        from mtrain.core.interfaces import Rates, Recipe, State

        self.backend = backend
        recipe = Recipe(
            rule="sgd",
            groups=tuple((m, {"weight_decay": d, "momentum": 0.937, "nesterov": 1.0}) for m, d in GROUPS),
            micro_batch=BATCH // RANKS,
            clip_norm=10.0,
            ema_decay=0.9999,
        )
        self.model, self.optimizer = backend.prepare(lambda: job.build(BATCH), recipe)
        shapes = {name: x.shape for name, x in backend.state(self.model, self.optimizer).weights.items()}
        backend.restore(self.model, self.optimizer, State(weights=job.start_values(shapes, BATCH)))
        self.schedule = lambda update: Rates(rates=(RATE, RATE, RATE))
        self.loader = Endless(job.micro_batches(BATCH // RANKS, seed=backend.collective.rank))
        self.records: list[dict[str, Any]] = []

    def updates(self, count: int) -> None:
        from mtrain.core.interfaces import Progress
        from mtrain.core.trainer import Cadences, Hooks, Job, Trainer

        work = Job(
            backend=self.backend,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            schedule=self.schedule,
            total_updates=count,
            accumulate=1,
            global_batch=BATCH,
        )
        Trainer(work, Cadences(evaluate_at_end=False), Hooks(on_update=self.records.append)).run(Progress())

    def difference(self, peer: "Peer") -> float:
        weights = self.backend.state(self.model, self.optimizer).weights
        return max(float(np.abs(p.numpy() - weights[name]).max()) for name, p in peer.inner.named_parameters())


class Peer:
    """The hand-written loop."""

    def __init__(self, backend: Any) -> None:
        import paddle
        from paddle.distributed import fleet

        from benchmarks import job

        self.paddle = paddle
        self.inner = job.build(BATCH)
        state = self.inner.state_dict()
        values = job.start_values({name: tuple(x.shape) for name, x in state.items()}, BATCH)
        for name, tensor in state.items():
            tensor.set_value(np.asarray(values[name]))
        self.ema = {name: x.clone() for name, x in state.items() if x.dtype == paddle.float32}
        self.model = fleet.distributed_model(self.inner)
        groups: list[list[Any]] = [[], [], []]
        for name, parameter in self.inner.named_parameters():
            groups[next(i for i, (m, _) in enumerate(GROUPS) if re.search(m, name))].append(parameter)
        optimizer = paddle.optimizer.Momentum(
            learning_rate=RATE,
            momentum=0.937,
            use_nesterov=True,
            parameters=[{"params": p, "weight_decay": d} for p, (_, d) in zip(groups, GROUPS, strict=True)],
            grad_clip=paddle.nn.ClipGradByGlobalNorm(10.0),
        )
        self.optimizer = fleet.distributed_optimizer(optimizer)
        self.batches = job.micro_batches(BATCH // RANKS, seed=backend.collective.rank)
        self.updates_taken = 0
        self.log: list[Any] = []
        self.model.train()

    def updates(self, count: int) -> None:
        for _ in range(count):
            batch = {name: self.paddle.to_tensor(x) for name, x in next(self.batches).items()}
            losses = self.model(batch)
            losses["total"].backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.follow()
            self.log.append({name: float(x) for name, x in losses.items()})

    def follow(self) -> None:
        """EMA, one entry at a time, as is usual."""
        self.updates_taken += 1
        decay = 0.9999 * (1 - math.exp(-self.updates_taken / 2000))
        live = self.inner.state_dict()
        with self.paddle.no_grad():
            for name, value in self.ema.items():
                self.ema[name] = value * decay + live[name] * (1 - decay)


if __name__ == "__main__":
    sys.exit(main())
