"""Evaluate the model of a script on a data set that all ranks share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mtrain.core.collective import broadcast
from mtrain.core.interfaces import Array, Collective, RankSession
from mtrain.core.samples.sampler import Padded
from mtrain.data import outcomes, trees
from mtrain.errors import DataError, ScriptError, UsageError
from mtrain.rank.script.models import ScriptModel

Metric = Callable[[Any, Any], Any]
"""Maps (predictions, targets) of the whole data set, in the order of its samples, to a number or a dict of numbers."""
Outcome = tuple[Any, Any]
"""(predictions, targets) of a batch, each with the batch as the first axis of its arrays."""


def read_outputs(module: Any, batch: Any) -> Outcome:
    """Return (predictions, targets) of a batch in the usual forms of models and batches.

    A module with a method ``predict`` returns both from ``predict(batch)``. Otherwise the batch is a pair (inputs,
    targets), and the module is called with the inputs.

    Raises:
        ScriptError: neither is the case.
    """
    if hasattr(module, "predict"):
        result = module.predict(batch)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        raise ScriptError(
            f"session.evaluate: {type(module).__name__}.predict(batch) returned {type(result).__name__}; expected the pair "
            "(predictions, targets), or give `step=`"
        )
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return module(batch[0]), batch[1]
    raise ScriptError(
        f"session.evaluate: no way to get predictions from {type(module).__name__} and a batch of type "
        f"{type(batch).__name__}; give `step=lambda model, batch: (predictions, targets)`, or the model a method "
        "predict(batch) that returns both"
    )


class OutcomeStep:
    """A callable in the form of a model whose output is a flat mapping of arrays, as a session's ``infer`` expects."""

    def __init__(self, module: Any, step: Callable[[Any, Any], Outcome]) -> None:
        self._module = module
        self._step = step
        self.structure: Any = None
        """Structure of the last result, see ``trees.flatten``."""
        self.batch_structure: Any = None

    def __call__(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of (predictions, targets) by path."""
        outcome = self._step(self._module, trees.rebuilt(self.batch_structure, tensors))
        if not (isinstance(outcome, tuple) and len(outcome) == 2):
            raise ScriptError(
                f"session.evaluate: `step` returned {type(outcome).__name__}; expected the pair (predictions, targets)"
            )
        tensors_by_path: dict[str, Any] = {}

        def leaf(path: str, value: Any) -> Any:
            if not hasattr(value, "detach"):
                return value
            tensors_by_path[path] = value
            return trees.ArrayPlace(path)

        self.structure = trees.map_leaves(outcome, leaf)
        return tensors_by_path


def outcome(
    rank: RankSession,
    entry: ScriptModel,
    runner: OutcomeStep,
    order: Iterable[list[int]],
    batch_of: Callable[[Sequence[int]], Any],
    *,
    floats: Any,
) -> Outcome:
    """Return (predictions, targets) of a data set, in the order of its samples. Every rank must call.

    They are computed with the averaged weights of a model, in evaluation mode. ``order``: the sample numbers of this rank's micro
    batches, see ``shares``. ``batch_of`` returns the batch of some samples.
    """
    parts = []
    with entry.updater.native.averaged():
        # A part of the module may be in another mode than the whole, such as a frozen BatchNorm.
        modes = [(module, module.training) for module in submodules(entry.module)]
        entry.module.eval()
        try:
            for indices in order:
                arrays, runner.batch_structure = trees.flatten(batch_of(indices), floats=floats)
                tensors = next(iter(rank.batches([arrays])))
                outputs = rank.infer(runner, tensors)
                parts.append((indices, numpy_tree(runner.structure, outputs)))
            return gather(rank.collective, parts)
        finally:
            for module, training in modes:
                module.training = training


def submodules(module: Any) -> Iterator[Any]:
    """Yield a module of torch or Paddle and all modules in it, each of which is in training or in evaluation mode."""
    yield module
    for child in module.children():
        yield from submodules(child)


def shares(length: int, collective: Collective, micro_batch: int) -> Iterator[list[int]]:
    """Yield the sample numbers of this rank's micro batches; all ranks have equally many."""
    order = Padded(length, size=collective.size, micro_batch=micro_batch)
    for indices in order.micro_batches(collective.rank):
        yield [int(index) for index in indices]


def gather(collective: Collective, parts: Sequence[tuple[list[int], Outcome]]) -> Outcome:
    """Join the results of all ranks in the order of the samples; a sample that was used twice counts once.

    ``parts`` holds (sample numbers, (predictions, targets)) of each micro batch of this rank, with arrays as leaves.
    """
    everything = [part for rank in collective.all_gather(list(parts)) for part in rank]
    rows: dict[int, tuple[int, int]] = {}
    for number, (indices, _) in enumerate(everything):
        for row, index in enumerate(indices):
            # All ranks have equally many micro batches, so some samples come twice; the first one counts.
            rows.setdefault(index, (number, row))
    order = [rows[index] for index in sorted(rows)]
    try:
        predictions = outcomes.join_rows([outcome[0] for _, outcome in everything], order)
        return predictions, outcomes.join_rows([outcome[1] for _, outcome in everything], order)
    except DataError as error:
        raise ScriptError(f"session.evaluate: {error}") from error


def score(collective: Collective, metric: Metric, predictions: Any, targets: Any) -> dict[str, float]:
    """Return the metrics that ``metric`` computes on rank 0, equal on every rank.

    An object with ``update`` and ``compute`` is fed on rank 0 alone.

    Raises:
        ScriptError: the metric returns something else than numbers.
    """
    message, metrics = "", {}
    # On rank 0 alone: a metric of the user's may draw random numbers or count its calls. Its error is sent to all, because a
    # rank that raised alone would leave the others waiting.
    if collective.rank == 0:
        try:
            metrics = outcomes.metrics_of(_compute(metric, predictions, targets), name=outcomes.name_of(metric))
        except UsageError as error:
            message = f"session.evaluate: {error}"
        except Exception as error:
            message = f"session.evaluate: the metric {outcomes.name_of(metric)} failed: {type(error).__name__}: {error}"
    message, metrics = broadcast(collective, (message, metrics))
    if message:
        raise ScriptError(message)
    return metrics


def _compute(metric: Any, predictions: Any, targets: Any) -> Any:
    if outcomes.is_object(metric):
        return outcomes.compute_metric(metric, predictions, targets)
    return metric(predictions, targets)


def numpy_tree(structure: Any, arrays: Mapping[str, Array]) -> Any:
    """Return an outcome with numpy arrays as its leaves; tensors of the batch that were left on the host, too."""

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, trees.ArrayPlace):
            return arrays[value.path]
        array = trees.as_array(value)
        return value if array is None else array

    return trees.map_leaves(structure, leaf)
