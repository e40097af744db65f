"""Check states and evaluation: whole arrays under neutral names, resume, and each image once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mtrain.core.checkpoint import store
from mtrain.core.evaluate import evaluate
from mtrain.core.interfaces import Array, HostBatch, Precision, RankSession, State, StateStream
from mtrain.core.samples.sampler import Padded
from mtrain.core.state.streams import PARTS, stream_of
from mtrain_kit import training
from mtrain_kit.check_context import LOGITS, Site
from mtrain_kit.checks import Measure, none_of
from mtrain_kit.convnet import SHAPES, build, data
from mtrain_kit.training import Case

HALF_WAY = 3
"""Number of updates after which a job is saved."""
CONTINUED = Case(batchnorm="synced", accumulate=2)
"""The case that is saved and resumed."""
IMAGES, MICRO_BATCH = 13, 2
"""Number of evaluated images, which only 1 of the numbers of ranks divides, and micro batch of the evaluation."""


def whole(site: Site) -> list[Measure]:
    """Check that a state holds copies of whole arrays, under the names and shapes that every backend gives them."""
    session, c = site.session, site.session.collective
    case = replace(CONTINUED, precision=site.precision)
    model, optimizer = training.start_training(session, case.recipe(c.size))
    batches = training.batches_of(session, case)
    for update in range(2):
        training.update_once(session, model, optimizer, batches, case, update)
    saved = session.state(model, optimizer)
    copied = {name: array.copy() for name, array in training.flat(saved).items()}
    streamed_wrongly = _changed_in_stream(copied, stream_of(session, model, optimizer, copied=False), c.rank)
    stream = stream_of(session, model, optimizer, copied=True)
    training.update_once(session, model, optimizer, batches, case, 2)
    streamed_wrongly += _changed_in_stream(copied, stream, c.rank)
    overwritten = training.differing_names(copied, training.flat(saved))
    fresh, other = session.prepare(build, case.recipe(c.size))
    session.restore(fresh, other, State(weights=saved.weights))
    restarted = session.state(fresh, other).ema
    floats = {name: array for name, array in saved.weights.items() if array.dtype.kind == "f"}
    session.restore(fresh, other, saved)
    again = session.state(fresh, other)
    lost = training.differing_names(copied, training.flat(again))
    lost += [name for name, value in saved.counters.items() if again.counters.get(name) != value]
    return [
        none_of("wrong names or shapes", _misfits(saved)),
        none_of("arrays that a later update overwrites", overwritten),
        none_of("arrays that come otherwise one by one than all at once", streamed_wrongly),
        none_of("arrays and counters that do not come back", lost),
        none_of("averages that do not restart from weights given alone", training.differing_names(floats, restarted)),
    ]


def _changed_in_stream(expected: Mapping[str, Array], stream: StateStream, rank: int) -> list[str]:
    """Return the arrays of a stream that differ from those of the whole state; every rank must call."""
    names = [f"{part}/{name}" for part in PARTS for name in stream.outlines[part]]
    arrays = [array for part in PARTS for array in stream.arrays(part, list(stream.outlines[part]))]
    wrong = [name for name in expected if name not in names]
    if rank == 0:
        received = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
        wrong += [name for name in expected if name in names and name not in received]
        wrong += training.differing_names({name: expected[name] for name in received if name in expected}, received)
    return wrong


def _misfits(state: State) -> list[str]:
    trained = {name: shape for name, shape in SHAPES.items() if "running" not in name and "tracked" not in name}
    floats = {name: shape for name, shape in SHAPES.items() if "tracked" not in name}
    expected = {
        **{f"weights/{name}": shape for name, shape in SHAPES.items()},
        **{f"ema/{name}": shape for name, shape in floats.items()},
        **{f"moments/momentum/{name}": shape for name, shape in trained.items()},
    }
    shapes = {name: tuple(array.shape) for name, array in training.flat(state).items()}
    mismatches = [
        f"{name} {shapes.get(name, 'is missing')}" for name, shape in expected.items() if shapes.get(name) != shape
    ]
    return mismatches + [f"{name} is unknown" for name in shapes if name not in expected]


def continues(site: Site) -> list[Measure]:
    """Check that six updates at once, and three, a fresh model and optimizer from the state, and three more give the
    same bits."""
    return [
        none_of(f"arrays that differ with {accumulate} micro batches per update", _compare_resumed(site, accumulate))
        for accumulate in (2, 1)  # without accumulation a graph may be static, and settle its order of additions later
    ]


def _compare_resumed(site: Site, accumulate: int) -> list[str]:
    session, c = site.session, site.session.collective
    case = replace(CONTINUED, accumulate=accumulate, precision=site.precision)
    final_states = []
    for cut in (None, HALF_WAY):
        model, optimizer = training.start_training(session, case.recipe(c.size))
        batches = training.batches_of(session, case)
        for update in range(training.UPDATES):
            if update == cut:
                saved = session.state(model, optimizer)
                model, optimizer = session.prepare(build, case.recipe(c.size))
                session.restore(model, optimizer, saved)
            training.update_once(session, model, optimizer, batches, case, update)
        final_states.append(session.state(model, optimizer))
    first, second = final_states
    counters = [name for name, value in first.counters.items() if second.counters.get(name) != value]
    return training.differing_names(training.flat(first), training.flat(second)) + counters


def continues_solo(site: Site) -> list[Measure]:
    """Check that a job resumed from a checkpoint of one rank of ``solo`` ends as ``solo`` would have ended it."""
    session, c = site.session, site.session.collective
    case = replace(CONTINUED, precision=site.precision)
    newest = store.newest(site.reference.checkpoints())
    assert newest is not None
    model, optimizer = session.prepare(build, case.recipe(c.size))
    session.restore(model, optimizer, store.load(newest).state)
    batches = training.batches_of(session, case, start=HALF_WAY)
    for update in range(HALF_WAY, training.UPDATES):
        training.update_once(session, model, optimizer, batches, case, update)
    learnt = training.flat(session.state(model, optimizer))
    expected = {name: x for name, x in site.reference.learnt(case).items() if "/" in name}
    differences = training.differences(expected, learnt)
    worst = max(differences, key=lambda name: differences[name])
    what = "weights, averages, moments: largest relative difference"
    return [Measure(what=what, value=differences[worst], bound=site.bound, detail=worst)]


class Collected:
    """An ``Evaluator`` of ``core.interfaces`` that keeps all predictions."""

    metrics: ClassVar[Sequence[str]] = ("score",)
    headline: ClassVar[Sequence[str]] = ("score",)

    def __init__(self) -> None:
        self.predictions: dict[int, list[Array]] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """See ``Evaluator.add``."""
        for index, prediction in zip(batch["index"].tolist(), predictions, strict=True):
            self.predictions.setdefault(index, []).append(prediction)

    def partial(self) -> Any:
        """See ``Evaluator.partial``."""
        return self.predictions

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """See ``Evaluator.result``; afterwards ``predictions`` holds those of all ranks."""
        union: dict[int, list[Array]] = {}
        for partial in partials:
            for index, values in partial.items():
                union.setdefault(index, []).extend(values)
        self.predictions = union
        return {"score": float(len(union)), "seen": float(sum(map(len, union.values())))}

    def remarks(self) -> list[str]:
        """Return no remarks."""
        return []


def evaluate_half_way(
    session: RankSession, precision: Precision, checkpoint_folder: Any
) -> tuple[Collected, dict[str, float], bool]:
    """Evaluate the half-way checkpoint. Return (the evaluator, metrics, whether the model is back in training mode)."""
    c, case = session.collective, replace(CONTINUED, precision=precision)
    model, optimizer = session.prepare(build, case.recipe(c.size))
    newest = store.newest(checkpoint_folder)
    assert newest is not None
    session.restore(model, optimizer, store.load(newest).state)
    evaluator = Collected()
    metrics = evaluate(session, model, optimizer, _images(c.rank, c.size), predictions=_rows, evaluator=evaluator)
    return evaluator, metrics, bool(model.training)


def _images(rank: int, size: int) -> Iterator[HostBatch]:
    images, labels = data()
    for indices in Padded(IMAGES, size=size, micro_batch=MICRO_BATCH).micro_batches(rank):
        yield {"images": images[indices], "labels": labels[indices], "index": indices}


def _rows(output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
    return list(output["logits"])


def evaluates(site: Site) -> list[Measure]:
    """Check that some rank sees every image, padding is recognised, and metrics are those of ``solo``."""
    c = site.session.collective
    evaluator, metrics, trains = evaluate_half_way(site.session, site.precision, site.reference.checkpoints())
    expected = site.reference.arrays(LOGITS)["logits"]
    missing = [f"image {i}" for i in range(IMAGES) if i not in evaluator.predictions]
    slots = Padded(IMAGES, size=c.size, micro_batch=MICRO_BATCH).batches_per_rank * c.size * MICRO_BATCH
    error = max(
        (training.differences({"x": expected}, {"x": np.array(logits)})["x"] for logits in _rounds(evaluator)),
        default=np.inf,
    )
    unequal = [f"rank {rank}" for rank, other in enumerate(c.all_gather(metrics)) if other != metrics]
    return [
        none_of("images that nobody saw", missing),
        none_of("ranks with other metrics", unequal),
        Measure(what="images seen too often or too rarely", value=abs(metrics["seen"] - slots), bound=0.0),
        Measure(what="outputs: largest relative difference", value=float(error), bound=site.bound),
        none_of("models left in evaluation mode", [] if trains else ["this one"]),
    ]


def _rounds(evaluator: Collected) -> Iterator[list[Array]]:
    """Yield the logits of all images: from the first and from the last time that each was seen."""
    if len(evaluator.predictions) == IMAGES:
        yield [evaluator.predictions[i][0] for i in range(IMAGES)]
        yield [evaluator.predictions[i][-1] for i in range(IMAGES)]
