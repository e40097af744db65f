"""Evaluate a model on the evaluation split, which all ranks share."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mtrain.core.collective import broadcast, gather_on_first
from mtrain.core.interfaces import (
    Array,
    Batch,
    Collective,
    Evaluator,
    HostBatch,
    Module,
    Narrow,
    Optimizer,
    RankSession,
    Variation,
)
from mtrain.errors import Interrupted

Item = TypeVar("Item")
Predictions = Callable[[Mapping[str, Array], HostBatch], Sequence[Any]]
"""Type of ``Model.predictions``, which turns model output into one value per sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmented:
    """How a micro batch is varied, and how the outputs for its variations become one."""

    varied: Callable[[HostBatch], Sequence[tuple[HostBatch, Variation]]]
    """See ``TaskKind.varied``."""
    joined: Callable[[Sequence[tuple[Mapping[str, Array], Variation]]], Mapping[str, Array]]
    """See ``Model.joined``."""


def evaluate(  # noqa: PLR0913  # the parts of an evaluation
    session: RankSession,
    model: Module,
    optimizer: Optimizer,
    loader: Iterable[HostBatch],
    *,
    predictions: Predictions,
    evaluator: Evaluator,
    augmented: Augmented | None = None,
    narrow: Narrow | None = None,
) -> dict[str, float]:
    """Return the metrics of the averaged weights over ``loader``, equal on every rank. Every rank must call.

    Args:
        session: this rank's session, which runs the forward passes.
        model: model from ``session.prepare``; it is in training mode afterwards.
        optimizer: provides the averaged weights.
        loader: micro batches of this rank, equally many on every rank (``sampler.Padded``).
        predictions: turns model output into one value per sample.
        evaluator: new evaluator, without predictions.
        augmented: how samples are varied; None: not at all.
        narrow: leaves out of the output what need not be downloaded; None: nothing.
    """
    with optimizer.averaged():
        model.eval()
        try:
            for output, host in outputs(session, model, loader, augmented=augmented, narrow=narrow):
                evaluator.add(host, predictions(output, host))
        finally:
            # Also when the evaluation fails or is interrupted: a script may go on training.
            model.train()
    return metrics_of(evaluator, session.collective)


def metrics_of(evaluator: Evaluator, collective: Collective) -> dict[str, float]:
    """Return the metrics of what all ranks have collected, equal on every rank. Every rank must call.

    Where ``Evaluator.scores_once`` says that scoring takes much time or memory, the first rank alone scores.
    """
    if collective.size == 1 or not getattr(evaluator, "scores_once", False):
        return evaluator.result(collective.all_gather(evaluator.partial()))
    # The metrics alone are sent back, so other ranks never hold the predictions of all.
    partials = gather_on_first(collective, evaluator.partial())
    metrics = evaluator.result(partials) if collective.rank == 0 else {}
    return broadcast(collective, metrics)


def interruptible(loader: Iterable[Item], *, collective: Collective, stop: Callable[[], bool]) -> Iterator[Item]:
    """Yield the micro batches of ``loader``. Before each one the ranks agree whether to end; every rank must iterate.

    Raises:
        Interrupted: ``stop`` returned True on some rank; it is raised on every rank.
    """
    for host in loader:
        # A signal reaches ranks at different times; one that ended alone would leave the others waiting.
        if collective.all_reduce(np.array([float(stop())]), "max")[0] > 0:
            raise Interrupted("ended from outside during evaluation")
        yield host


def narrowing(session: RankSession, narrow: Narrow) -> Narrow | None:
    """Return ``narrow`` where outputs are downloaded from a device; None on the CPU, which would only compute more."""
    return None if session.device.startswith("cpu") else narrow


def outputs(
    session: RankSession,
    model: Module,
    loader: Iterable[HostBatch],
    *,
    augmented: Augmented | None = None,
    narrow: Narrow | None = None,
) -> Iterator[tuple[Mapping[str, Array], HostBatch]]:
    """Yield the model's output for each micro batch, together with the micro batch of ``loader`` that it belongs to.

    With ``augmented``, the output is the joined one of all variations of the micro batch.
    """
    pending: deque[tuple[HostBatch, list[Variation]]] = deque()
    # The session may prefetch micro batches before it returns the first one.

    def vary_copies() -> Iterator[HostBatch]:
        for host in loader:
            copies = [] if augmented is None else augmented.varied(host)
            pending.append((host, [variation for _, variation in copies]))
            yield from [copy for copy, _ in copies] or [host]

    def infer(batch: Batch) -> Mapping[str, Array]:
        return session.infer(model, batch) if narrow is None else session.infer(model, batch, narrow=narrow)

    batches = session.batches(vary_copies())
    for batch in batches:
        output = infer(batch)
        host, variations = pending.popleft()
        if augmented is None:
            yield output, host
        else:
            others = [infer(next(batches)) for _ in variations[1:]]
            yield augmented.joined(list(zip([output, *others], variations, strict=True))), host
