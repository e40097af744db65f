"""Let two loops take turns in the same processes: blocks of a few updates, the ratio of each pair of blocks, the
median."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

RANKS, BATCH, RATE = 2, 8, 0.01
MOMENTUM, CLIP, EMA, EMA_RAMP = 0.937, 10.0, 0.9999, 2000
GROUPS = ((r"\.bias$", 0.0), (r"\.bn\.weight$", 0.0), ("", 5e-4))
"""(regex of parameter names, weight decay) of each group; the first match applies."""


class Loop(Protocol):
    """A training loop that continues where it stopped."""

    def updates(self, count: int) -> None:
        """Train for ``count`` updates."""

    def weights(self) -> Mapping[str, Any]:
        """Return parameters by name as numpy arrays; all ranks must call this."""


@dataclass(frozen=True)
class Turns:
    """Length of the measurement of both loops."""

    blocks: int = 12
    updates: int = 4
    """Updates per block."""
    warmup: int = 3


class Ours:
    """The training loop, recording every update."""

    def __init__(self, session: Any, *, channels_last: bool) -> None:
        from benchmarks import job
        from mtrain.core.interfaces import Rates, Recipe, State

        self.session = session
        recipe = Recipe(
            rule="sgd",
            groups=tuple((m, {"weight_decay": d, "momentum": MOMENTUM, "nesterov": 1.0}) for m, d in GROUPS),
            micro_batch=BATCH // RANKS,
            clip_norm=CLIP,
            ema_decay=EMA,
            ema_ramp=EMA_RAMP,
            channels_last=channels_last,
        )
        self.model, self.optimizer = session.prepare(lambda: job.build(BATCH), recipe)
        shapes = {name: x.shape for name, x in session.state(self.model, self.optimizer).weights.items()}
        session.restore(self.model, self.optimizer, State(weights=job.start_values(shapes, BATCH)))
        self.schedule = lambda update: Rates(learning_rates=(RATE, RATE, RATE))
        self.loader = Endless(job.micro_batches(BATCH // RANKS, seed=session.collective.rank))
        self.records: list[dict[str, Any]] = []

    def updates(self, count: int) -> None:
        from mtrain.core.interfaces import Progress
        from mtrain.core.samples.feed import LoaderFeed
        from mtrain.core.samples.sampler import Shares
        from mtrain.core.update.cadence import Cadences
        from mtrain.core.update.loop import Hooks, Job, Loop
        from mtrain.core.update.stepping import Stepper
        from mtrain.core.update.trainer import train

        work = Job(
            session=self.session,
            steppers=[Stepper(self.optimizer, self.schedule)],
            feed=LoaderFeed(session=self.session, loader=self.loader, global_batch=BATCH),
            total_updates=count,
            shares=Shares.even(self.session.collective, rounds=1),
            sums_metrics=True,
        )
        hooks = Hooks(on_update=self.records.append)
        train(Loop(work, Cadences(evaluate_at_end=False), hooks, Progress()), self.model)

    def weights(self) -> Mapping[str, Any]:
        return self.session.state(self.model, self.optimizer).weights


class Endless:
    """A loader that continues where it stopped."""

    updates_per_epoch = 10**9

    def __init__(self, source: Any) -> None:
        self._source = source

    def micro_batches(self, epoch: int, start: int = 0) -> Any:
        return iter(self._source.__next__, None)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def take(ours: Loop, peer: Loop, turns: Turns) -> dict[str, list[float]]:
    """Return the milliseconds per update of each block."""
    for loop in (ours, peer):
        loop.updates(turns.warmup)
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for block in range(turns.blocks):
        order = [("ours", ours), ("peer", peer)]
        for name, loop in order if block % 2 else order[::-1]:
            started = time.perf_counter()
            loop.updates(turns.updates)
            times[name].append((time.perf_counter() - started) / turns.updates * 1000)
    return times


def difference(ours: Loop, peer: Loop) -> float:
    """Return the largest difference of any parameter; all ranks must call this."""
    mine, theirs = ours.weights(), peer.weights()
    return max(float(np.abs(np.asarray(x) - mine[name]).max()) for name, x in theirs.items())


def report(name: str, times: Mapping[str, list[float]], target: Path, *, gap: float, bound: float | None) -> None:
    """Print the ratio and write its row for the table."""
    ratios = sorted(a / b for a, b in zip(times["ours"], times["peer"], strict=True))
    row = {
        "name": f"update, {name}",
        "ours": median(times["ours"]),
        "peer": median(times["peer"]),
        "unit": "ms",
        "ratio": median(ratios),
        "target": bound,
        "better": "lower",
    }
    print(
        f"{name}: {row['ours']:.0f} ms / {row['peer']:.0f} ms, ratio {row['ratio']:.3f}, middle half of the blocks "
        f"{ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}; "
        f"largest difference of a weight after the same updates: {gap:.1e}",
        flush=True,
    )
    target.write_text(json.dumps([row]))
