"""Milliseconds per update: the Trainer on backend ddp against a hand-written DDP loop. Target: ratio <= 1.02.

Both train YOLOv5n at 320 px, global batch 8 on 2 ranks, SGD with nesterov, three groups, clipping, EMA, with the same layout
of memory, the same model and the same batches. The peer is what a good programmer writes: DDP with
``gradient_as_bucket_view`` and ``static_graph``, ``torch.optim.SGD``, ``clip_grad_norm_``, EMA over a ``state_dict``. Both
live in the same two processes and take turns in blocks of a few updates; ratios are taken block by block.
"""

import argparse
import copy
import json
import math
import os
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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return subprocess.run(
        [sys.executable, *starter, __file__, "--rank", *sys.argv[1:]], env=env, check=False
    ).returncode


def run(options: argparse.Namespace) -> int:
    """One rank: both loops in turns."""
    from benchmarks import job
    from mtrain.backends.ddp import DDP

    job.bind()
    with DDP(DDP.Options(device="cpu")) as backend:
        ours, peer = Ours(backend), Peer(backend.collective.rank)
        for loop in (ours, peer):
            loop.updates(3)
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for block in range(options.blocks):
            order = [("ours", ours), ("peer", peer)]
            for name, loop in order if block % 2 else order[::-1]:
                started = time.perf_counter()
                loop.updates(options.updates)
                times[name].append((time.perf_counter() - started) / options.updates * 1000)
        if backend.collective.rank == 0:
            report(times, options.json, gap=difference(ours.model.module, peer.model.module))
    return 0


def report(times: dict[str, list[float]], target: Path, *, gap: float) -> None:
    ratios = [a / b for a, b in zip(times["ours"], times["peer"], strict=True)]
    row = {
        "name": "update, Trainer / hand-written DDP",
        "ours": median(times["ours"]),
        "peer": median(times["peer"]),
        "unit": "ms",
        "ratio": median(ratios),
        "target": 1.02,
        "better": "lower",
    }
    quarters = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-len(ratios) // 4]
    print(f"ratio {row['ratio']:.3f}, middle half of the blocks {quarters[0]:.3f} to {quarters[1]:.3f}")
    print(f"largest difference of a weight after the same updates: {gap:.1e}")
    target.write_text(json.dumps([row]))


def difference(a: Any, b: Any) -> float:
    return max(
        float((x.detach() - y.detach()).abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


class Ours:
    """The Trainer with a record of every update."""

    def __init__(self, backend: Any) -> None:
        from benchmarks import job
        from mtrain.core.interfaces import Rates, Recipe, State

        self.rank = backend.collective.rank
        self.backend = backend
        self.recipe = Recipe(
            rule="sgd",
            groups=tuple((m, {"weight_decay": d, "momentum": 0.937, "nesterov": 1.0}) for m, d in GROUPS),
            micro_batch=BATCH // RANKS,
            clip_norm=10.0,
            ema_decay=0.9999,
            channels_last=True,
        )
        self.model, self.optimizer = backend.prepare(lambda: job.build(BATCH), self.recipe)
        shapes = {name: x.shape for name, x in backend.state(self.model, self.optimizer).weights.items()}
        backend.restore(self.model, self.optimizer, State(weights=job.start_values(shapes, BATCH)))
        self.schedule = lambda update: Rates(rates=(RATE, RATE, RATE))
        self.loader = Endless(job.micro_batches(BATCH // RANKS, seed=self.rank))
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


class Endless:
    """A loader that goes on where it was."""

    updates_per_epoch = 10**9

    def __init__(self, source: Any) -> None:
        self._source = source

    def micro_batches(self, epoch: int, start: int = 0) -> Any:
        return iter(self._source.__next__, None)

    def close(self) -> None:
        """Nothing to close."""


class Peer:
    """The hand-written loop."""

    def __init__(self, rank: int) -> None:
        import re

        import torch
        from torch.nn.parallel import DistributedDataParallel

        from benchmarks import job

        self.torch = torch
        inner = job.build(BATCH)
        state = inner.state_dict()
        values = job.start_values({name: tuple(x.shape) for name, x in state.items()}, BATCH)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(torch.from_numpy(np.asarray(values[name])))
        inner = inner.to(memory_format=torch.channels_last).train()
        self.ema = copy.deepcopy(inner).eval()
        for parameter in self.ema.parameters():
            parameter.requires_grad_(requires_grad=False)
        self.model = DistributedDataParallel(
            inner, forward_sync_buffers=False, gradient_as_bucket_view=True, static_graph=True
        )
        groups: list[list[Any]] = [[], [], []]
        for name, parameter in inner.named_parameters():
            groups[next(i for i, (m, _) in enumerate(GROUPS) if re.search(m, name))].append(parameter)
        self.optimizer = torch.optim.SGD(
            [{"params": p, "weight_decay": d} for p, (_, d) in zip(groups, GROUPS, strict=True)],
            lr=RATE,
            momentum=0.937,
            nesterov=True,
        )
        self.batches = job.micro_batches(BATCH // RANKS, seed=rank)
        self.updates_taken = 0
        self.log: list[Any] = []

    def updates(self, count: int) -> None:
        torch = self.torch
        for _ in range(count):
            batch = {name: torch.from_numpy(x) for name, x in next(self.batches).items()}
            losses = self.model(batch)
            losses["total"].backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.follow()
            self.log.append({name: float(x.detach()) for name, x in losses.items()} | {"norm": float(norm)})

    def follow(self) -> None:
        """EMA, one entry at a time, as is usual."""
        torch = self.torch
        self.updates_taken += 1
        decay = 0.9999 * (1 - math.exp(-self.updates_taken / 2000))
        live = self.model.module.state_dict()
        with torch.no_grad():
            for name, value in self.ema.state_dict().items():
                if value.dtype.is_floating_point:
                    value.mul_(decay).add_(live[name], alpha=1 - decay)


if __name__ == "__main__":
    sys.exit(main())
