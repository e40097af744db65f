"""Score a user's model with the metrics that the spec names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mtrain.core.collective import broadcast
from mtrain.core.interfaces import Collective, HostBatch
from mtrain.data import outcomes
from mtrain.data.objects import is_module
from mtrain.errors import SpecError, UsageError
from mtrain.spec import references
from mtrain.spec.references import Parameters, Reference
from mtrain.tasks.own import calls

PREDICTIONS = ("predictions", "preds", "pred", "predicted", "prediction", "y_pred", "y_score", "y_prob", "y_proba")
TARGETS = ("targets", "target", "labels", "y_true", "truth", "references")
"""Names by which the parameters of a metric are recognised, so that their order does not matter."""


@dataclass(frozen=True)
class Metric:
    """One metric of the spec, ready to be called."""

    name: str
    compute: Callable[[Any, Any], Any]
    """Maps (predictions, targets) of the whole split, as arrays, to a number or a dict of numbers."""


def metric(reference: Reference, options: Mapping[str, Any]) -> Metric:
    """Return the metric that ``reference`` names.

    A class is made with the options. A function with parameters for predictions and, if it has one, targets is called
    with both by name, and with the options. A function without is called once with the options, and returns an object.

    Raises:
        UsageError: it cannot be imported or made, or is no metric.
    """
    target = references.import_object(reference)
    if outcomes.is_object(target) and not isinstance(target, type):
        return Metric(reference.name, _feeder(target))
    parameters = calls.parameters_of(target)
    if not isinstance(target, type):
        named = _parameter_names(parameters)
        if named is not None:
            return Metric(reference.name, _function(target, named, options))
        if parameters is None or set(parameters.required) - options.keys():
            raise SpecError(_unclear(reference))
    found = calls.make(reference, options, {}, path=f"evaluate.metric_options.{reference.name}")
    if not outcomes.is_object(found):
        raise SpecError(_unclear(reference))
    return Metric(reference.name, _feeder(found))


def _unclear(reference: Reference) -> str:
    return (
        f"evaluate.metrics: {reference.words}: cannot tell how to call it; expected a function with parameters named like "
        "predictions and targets, or a class with update(predictions, targets) and compute()"
    )


def _parameter_names(parameters: Parameters | None) -> tuple[str, str | None] | None:
    """Return the names of the parameters for predictions and for targets; None if there is no such parameter."""
    names = () if parameters is None else parameters.names
    predictions = next((name for name in names if name in PREDICTIONS), None)
    return None if predictions is None else (predictions, next((name for name in names if name in TARGETS), None))


def _function(function: Any, named: tuple[str, str | None], options: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    def compute(predictions: Any, targets: Any) -> Any:
        values = {named[0]: predictions} | ({} if named[1] is None else {named[1]: targets})
        return function(**values, **options)

    return compute


def _feeder(found: Any) -> Callable[[Any, Any], Any]:
    def compute(predictions: Any, targets: Any) -> Any:
        if is_module(found):  # a metric of torchmetrics, which takes tensors
            from mtrain.core import ops

            predictions, targets = (_mapped_arrays(value, ops.asarray) for value in (predictions, targets))
        return outcomes.compute_metric(found, predictions, targets)

    return compute


def _mapped_arrays(value: Any, convert: Callable[[Any], Any]) -> Any:
    from mtrain.data import trees

    return trees.map_leaves(value, lambda _, leaf: convert(leaf) if isinstance(leaf, np.ndarray) else leaf)


class OwnEvaluator:
    """Collects predictions and targets. Implements ``core.interfaces.Evaluator``.

    Metrics are computed on rank 0, on all samples in their order, each once; the metrics are sent to the other ranks.
    """

    metrics: ClassVar[Sequence[str]] = ("score",)

    def __init__(self, metrics: Sequence[Metric], collective: Collective | None, *, lower_is_better: bool) -> None:
        self._metrics = metrics
        self._collective = collective
        self._lower_is_better = lower_is_better
        self._rows: dict[int, Any] = {}
        self._names: list[str] = [metric.name for metric in metrics]

    @property
    def headline(self) -> Sequence[str]:
        """Return the names of the metrics, the first metric's first."""
        return self._names[:4]

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add (prediction, target) of each sample of a micro batch. A sample that was already added is skipped."""
        for index, pair in zip(batch["index"], predictions, strict=True):
            self._rows.setdefault(int(index), pair)

    def partial(self) -> dict[int, Any]:
        """Return (prediction, target) of this rank's samples by their number."""
        return self._rows

    def result(self, partials: Sequence[Mapping[int, Any]]) -> dict[str, float]:
        """Return the metrics of all metrics, and ``score``. Every rank must call.

        Raises:
            UsageError: a metric fails, or returns something else than numbers.
        """
        message, metrics = "", dict[str, float]()
        if self._collective is None or self._collective.rank == 0:
            message, metrics = self._score(partials)
        if self._collective is not None:
            message, metrics = broadcast(self._collective, (message, metrics))
        if message:
            raise SpecError(message)
        self._names = [name for name in metrics if name != "score"]
        return metrics

    def _score(self, partials: Sequence[Mapping[int, Any]]) -> tuple[str, dict[str, float]]:
        union = {index: pair for partial in reversed(partials) for index, pair in partial.items()}
        ordered = [union[index] for index in sorted(union)]
        predictions, targets = (
            outcomes.stack([pair[0] for pair in ordered]),
            outcomes.stack([pair[1] for pair in ordered]),
        )
        metrics: dict[str, float] = {}
        for each in self._metrics:
            try:
                metrics |= outcomes.metrics_of(each.compute(predictions, targets), name=each.name)
            except UsageError as error:
                return f"evaluate.metrics: {error}", {}
            except Exception as error:  # A user's code may raise any exception.
                return f"evaluate.metrics: {each.name} failed: {references.tell_error(error)}", {}
        first = next(iter(metrics.values()))
        return "", {**metrics, "score": metrics.get("score", -first if self._lower_is_better else first)}

    def remarks(self) -> list[str]:
        """Return no remarks."""
        return []
