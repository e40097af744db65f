"""Measurements of a pruned network: its metrics, its time for a batch, and its difference from the masked network."""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtrain.core.evaluate import evaluate
from mtrain.core.interfaces import Array, HostBatch, Module, Optimizer, Rates, State
from mtrain.core.network import pruned
from mtrain.core.network.pruned import Sizes
from mtrain.errors import UsageError
from mtrain.rank.spec.assembly import Assembly

_TAYLOR_UPDATES = 8
"""Number of updates whose gradients are used."""
_TIMED_PAIRS = 15
_UNTIMED_PAIRS = 3
_TOLERANCE = 1e-8
"""Largest difference from the masked network, relative to its outputs, that is rounding in float64."""


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """A network that was prepared on the session of a job."""

    model: Module
    optimizer: Optimizer


class Bench:
    """Builds, fills, evaluates and times networks of one job, whole or pruned."""

    def __init__(self, job: Assembly) -> None:
        """Read a batch of each split; the loaders stay open for evaluations."""
        self.job = job
        self._evaluation = job.evaluation_loader()
        self._training = job.training_loader()
        self.evaluation_batch = _first(self._evaluation)
        self.training_batch = _first(self._training)

    def close(self) -> None:
        """Close the loaders."""
        self._evaluation.close()
        self._training.close()

    def network(self, weights: Mapping[str, Array], sizes: Sizes | None, **changes: Any) -> TrainedNetwork:
        """Prepare a network with these weights; ``changes`` are changes of the recipe."""
        job = self.job
        model, optimizer = job.session.prepare(
            lambda: pruned.build(job.plugin, job.task, job.session.collective, sizes), replace(job.recipe, **changes)
        )
        job.session.restore(model, optimizer, State(weights=dict(weights)))
        return TrainedNetwork(model=model, optimizer=optimizer)

    def fill(self, network: TrainedNetwork, weights: Mapping[str, Array]) -> None:
        """Put other weights into a network."""
        self.job.session.restore(network.model, network.optimizer, State(weights=dict(weights)))

    def metrics(self, network: TrainedNetwork) -> tuple[dict[str, float], list[str]]:
        """Return the metrics of a network on the evaluation split, and the names of the most important ones."""
        job = self.job
        evaluator = job.data.evaluator()
        metrics = evaluate(
            job.session,
            network.model,
            network.optimizer,
            self._evaluation.micro_batches(0),
            predictions=job.plugin.predictions,
            evaluator=evaluator,
        )
        if not metrics:
            raise UsageError(f"the evaluation split cannot be scored: {'; '.join(evaluator.remarks())}")
        name = job.spec.evaluate.score or "score"
        if name not in metrics:
            raise UsageError(f"evaluate.score: {name!r} given, this evaluation has {', '.join(metrics)}")
        return {**metrics, "score": metrics[name]}, list(evaluator.headline)

    def outputs(self, network: TrainedNetwork) -> dict[str, Array]:
        """Return the outputs of a network in evaluation for one batch."""
        network.model.eval()
        (batch,) = self.job.session.batches([self.evaluation_batch])
        return self.job.session.infer(network.model, batch)

    def gradients(self, weights: Mapping[str, Array], sizes: Sizes | None) -> Sequence[Mapping[str, Array]]:
        """Return the gradients of the first updates of the job, by name, at the given weights."""
        job = self.job
        momentum = 0.5  # the moments of plain momentum are a sum of gradients, from which each one follows
        group = {"momentum": momentum, "nesterov": 0.0, "weight_decay": 0.0}
        network = self.network(weights, sizes, rule="sgd", groups=(("", group),), clip_norm=float("inf"), ema_decay=0.0)
        network.model.train()
        updates: list[Mapping[str, Array]] = []
        before: Mapping[str, Array] = {}
        count = min(_TAYLOR_UPDATES, self._training.updates_per_epoch)
        with closing(_closable(job.session.batches(self._training.micro_batches(0)))) as batches:
            for _ in range(count):
                for i in range(job.recipe.accumulate):
                    batch = next(batches)
                    with network.optimizer.micro_batch(last=i == job.recipe.accumulate - 1):
                        network.optimizer.backward(network.model(batch)["total"])
                network.optimizer.step(Rates(learning_rates=(0.0,)))
                moments = job.session.state(network.model, network.optimizer).moments
                after = {name.removeprefix("momentum/"): array for name, array in moments.items()}
                updates.append({name: x - momentum * before[name] if before else x for name, x in after.items()})
                before = after
        return updates

    def difference(self, masked: Mapping[str, Array], small: Mapping[str, Array], sizes: Sizes) -> tuple[float, float]:
        """Return the largest difference of outputs between the masked and the smaller network in float64.

        The second number is the largest absolute output of the masked network.

        Raises:
            UsageError: they differ by more than rounding, so the network depends on its channels in a way that the trace
                does not see.
        """
        former = self.job.spec.model.pruned
        # In float32 rounding would hide a small mistake, such as a channel that is cut in one of two places.
        whole = self.outputs(self.network(masked, former, precision="fp64"))
        less = self.outputs(self.network(small, sizes, precision="fp64"))
        difference = max(float(np.max(np.abs(whole[name] - less[name]))) for name in whole)
        largest = max(float(np.max(np.abs(array))) for array in whole.values())
        if not difference <= _TOLERANCE * max(largest, 1.0):
            raise UsageError(
                f"the smaller network differs from the masked one by {difference:.3g} in float64, which is more than "
                "rounding: this model depends on its channels in a way that cannot be followed, so it was not pruned"
            )
        return difference, largest

    def times_s(self, one: TrainedNetwork, other: TrainedNetwork) -> tuple[float, float]:
        """Return the median time in seconds of each network for the same batch; they take turns."""
        (batch,) = self.job.session.batches([self.evaluation_batch])
        one.model.eval()
        other.model.eval()
        times: tuple[list[float], list[float]] = ([], [])
        # Taking turns, both networks see the same load and the same clock of the processor.
        for turn in range(_UNTIMED_PAIRS + _TIMED_PAIRS):
            for network, seconds in zip((one, other), times, strict=True):
                began = time.perf_counter()
                self.job.session.infer(network.model, batch)
                if turn >= _UNTIMED_PAIRS:
                    seconds.append(time.perf_counter() - began)
        return statistics.median(times[0]), statistics.median(times[1])


def _first(loader: Any) -> HostBatch:
    """Return a copy of the first micro batch, whose memory the loader uses again."""
    with closing(_closable(loader.micro_batches(0))) as batches:
        return {name: np.array(array) for name, array in next(batches).items()}


def _closable(items: Any) -> Any:
    """Yield the items; the generator can be closed, whatever ``items`` is."""
    yield from items
