"""Join predictions and targets of many batches, and turn the result of a metric into metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.data import trees
from mtrain.errors import DataError


def join_rows(values: Sequence[Any], order: Sequence[tuple[int, int]]) -> Any:
    """Return one value with the rows ``order``, pairs (number of the value, row), of batched ``values``.

    Raises:
        DataError: a value has no row for each sample.
    """
    first = values[0]
    if isinstance(first, Mapping):
        return {key: join_rows([value[key] for value in values], order) for key in first}
    if isinstance(first, tuple):
        return tuple(join_rows([value[place] for value in values], order) for place in range(len(first)))
    if isinstance(first, np.ndarray) and first.ndim == 0:
        raise DataError(
            "the model returned a single number for a batch; expected one prediction per sample, with the batch as the "
            "first axis"
        )
    rows = [values[number][row] for number, row in order]
    return stack(rows) if isinstance(first, np.ndarray) else rows


def stack(rows: Sequence[Any]) -> Any:
    """Join the rows of all samples: arrays of equal shapes are stacked, others stay a list."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {key: stack([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        return tuple(stack([row[place] for row in rows]) for place in range(len(first)))
    if isinstance(first, np.ndarray | np.generic) and len({np.shape(row) for row in rows}) == 1:
        return np.stack(rows)
    return list(rows)


def is_object(metric: Any) -> bool:
    """Return whether a metric is an object that is fed with ``update`` and read with ``compute``."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def compute_metric(metric: Any, predictions: Any, targets: Any) -> Any:
    """Return the result of a metric object on the predictions and targets of a whole data set."""
    # The object is called on one rank alone, so a metric of torchmetrics must not wait for the others.
    _stop_synchronising(metric)
    if hasattr(metric, "reset"):
        metric.reset()
    metric.update(predictions, targets)
    return metric.compute()


def _stop_synchronising(metric: Any) -> None:
    """Keep a metric of torchmetrics, and those inside it, from communicating when it is computed."""
    for part in metric.modules() if hasattr(metric, "modules") else ():
        if hasattr(part, "distributed_available_fn"):
            # ``sync_on_compute`` counts in the constructor only (seen
            # in torchmetrics 1.9); this is asked at every ``compute``.
            part.distributed_available_fn = _one_process


def _one_process() -> bool:
    return False


def metrics_of(value: Any, *, name: str) -> dict[str, float]:
    """Return the result of the metric ``name``, a number or a dict of numbers, as metrics by name.

    Raises:
        DataError: it is something else.
    """
    entries = value if isinstance(value, Mapping) else {name: value}
    metrics = {}
    for key, entry in entries.items():
        array = trees.as_array(entry)
        number = entry if array is None else array
        try:
            metrics[str(key)] = float(number)
        except (TypeError, ValueError):
            shape = "" if array is None else f" of shape {array.shape}"
            raise DataError(
                f"the metric {name} returned {type(entry).__name__}{shape} for {key!r}; expected a number, or a dict of "
                "numbers"
            ) from None
    return metrics


def name_of(metric: Any) -> str:
    """Return the name of a metric: that of the function or the class."""
    return getattr(metric, "__name__", type(metric).__name__).strip("<>")
