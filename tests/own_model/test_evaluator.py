"""Metrics of a user's own: the whole split in the order of its samples, each once."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.data import outcomes
from mtrain.errors import SpecError
from mtrain.tasks.own.evaluator import Metric, OwnEvaluator


def seen(found: list[Any]) -> Callable[[Any, Any], float]:
    def compute(predictions: Any, targets: Any) -> float:
        found.append((predictions, targets))
        return float(len(targets))

    return compute


def partials() -> list[Mapping[int, Any]]:
    """Samples 0 to 5, in the order in which two ranks have computed them; both have sample 3."""
    ranks = []
    for numbers in ([4, 0, 3], [5, 3, 1, 2]):
        evaluator = OwnEvaluator([], None, lower_is_better=False)
        pairs = [(np.float32(number), number * 10) for number in numbers]
        evaluator.add({"index": np.array(numbers)}, pairs)
        evaluator.add({"index": np.array([numbers[0]])}, [(np.float32(99), 99)])  # fills the last batch
        ranks.append(evaluator.partial())
    return ranks


def test_a_metric_gets_every_sample_once_in_the_order_of_the_split() -> None:
    found: list[Any] = []
    evaluator = OwnEvaluator([Metric("count", seen(found))], None, lower_is_better=False)
    assert evaluator.result(partials()) == {"count": 6.0, "score": 6.0}
    ((predictions, targets),) = found
    assert predictions.tolist() == [0, 1, 2, 3, 4, 5]
    assert targets == [0, 10, 20, 30, 40, 50]


def test_the_score_is_the_first_metric_turned_where_lower_is_better() -> None:
    metrics = [Metric("error", lambda *_: 0.25), Metric("f1", lambda *_: {"f1": 0.5, "recall": 0.75})]
    for lower_is_better, score in ((True, -0.25), (False, 0.25)):
        evaluator = OwnEvaluator(metrics, None, lower_is_better=lower_is_better)
        expected = {"error": 0.25, "f1": 0.5, "recall": 0.75, "score": score}
        assert evaluator.result(partials()) == expected
        assert list(evaluator.headline) == ["error", "f1", "recall"]
    named = OwnEvaluator([Metric("all", lambda *_: {"a": 1.0, "score": 3.0})], None, lower_is_better=True)
    assert named.result(partials())["score"] == 3.0


def test_a_metric_that_fails_is_named() -> None:
    def broken(predictions: Any, targets: Any) -> float:
        raise ValueError("no positives")

    with pytest.raises(SpecError, match=r"broken failed: .*no positives"):
        OwnEvaluator([Metric("broken", broken)], None, lower_is_better=False).result(partials())


def test_rows_are_joined_along_a_new_first_axis() -> None:
    rows = [{"a": np.full((2, 3), i), "b": (np.float32(i), [i])} for i in range(4)]
    joined = outcomes.stack(rows)
    assert joined["a"].shape == (4, 2, 3)
    assert joined["a"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert joined["b"][0].tolist() == [0, 1, 2, 3]
    assert joined["b"][1] == [[0], [1], [2], [3]]
    uneven = [np.zeros(2), np.zeros(3)]
    assert [len(row) for row in outcomes.stack(uneven)] == [2, 3]
