"""Scoring the evaluation split over all ranks."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, Backend, Collective, Evaluator, HostBatch, Module, Optimizer
from mtrain.errors import Interrupted

Predictions = Callable[[Mapping[str, Array], HostBatch], Sequence[Any]]
"""``Model.predictions``."""


def evaluate(
    backend: Backend,
    model: Module,
    optimizer: Optimizer,
    loader: Iterable[HostBatch],
    *,
    predictions: Predictions,
    evaluator: Evaluator,
) -> dict[str, float]:
    """Figures of the averaged weights over ``loader``; the same on every rank. Every rank calls.

    Args:
        backend: entered; it runs the forward passes.
        model: what ``backend.prepare`` returned; left in training mode.
        optimizer: gives the averaged weights.
        loader: this rank's micro batches; as many on every rank (``sampler.Padded``).
        predictions: turns model output into one value per sample.
        evaluator: a fresh one.
    """
    with optimizer.averaged():
        model.eval()
        try:
            for output, host in outputs(backend, model, loader):
                evaluator.add(host, predictions(output, host))
        finally:
            model.train()
    return evaluator.result(backend.collective.all_gather(evaluator.partial()))


def interruptible(
    loader: Iterable[HostBatch], *, collective: Collective, stop: Callable[[], bool]
) -> Iterator[HostBatch]:
    """What ``loader`` yields; before each micro batch the ranks agree whether to end.

    Raises:
        Interrupted: ``stop`` said so on some rank; raised on every rank.
    """
    for host in loader:
        if collective.all_reduce(np.array([float(stop())]), "max")[0] > 0:
            raise Interrupted("ended from outside during evaluation")
        yield host


def outputs(
    backend: Backend, model: Module, loader: Iterable[HostBatch]
) -> Iterator[tuple[dict[str, Array], HostBatch]]:
    """What the model returns for each micro batch, beside the micro batch as the loader gave it."""
    ahead: deque[HostBatch] = deque()

    def remembered() -> Iterator[HostBatch]:
        for host in loader:
            ahead.append(host)
            yield host

    for batch in backend.batches(remembered()):
        yield backend.infer(model, batch), ahead.popleft()
