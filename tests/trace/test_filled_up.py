"""A last update that is filled up with samples of before is told from one that is dropped, whatever micro batches it has."""

from collections import Counter
from pathlib import Path

from mtrain_trace import causes, differences
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.reading import Trace, Update


def trace(*last: str) -> Trace:
    """Return a training whose first update has two micro batches of four samples, and whose last one has one."""
    first = [f"s{number}" for number in range(8)]
    updates = [
        Update(1, samples=Counter(first), rank_samples=[first], micro_batches=2),
        Update(2, samples=Counter(last), rank_samples=[list(last)], micro_batches=1),
    ]
    optimizer = {"rule": "SGD", "groups": [], "shapes": {}, "dtypes": ["float32"], "sharded": False, "unseen": []}
    return Trace(Path("t"), [{"ranks": 1, "optimizers": [optimizer]}], updates, {})


def cause(a: Trace, b: Trace) -> str:
    parting = Parting(differences.SAMPLES, 2, 0.75, place=1)
    return causes.explain(Comparison(a, b, 2, parting=parting))[0]


def test_a_micro_batch_that_is_filled_up_is_told_on_either_side() -> None:
    short, filled = trace("s8"), trace("s8", "s0", "s1", "s2")
    assert "B fills the last, incomplete batch up with samples that it had before" in cause(short, filled)
    assert "A fills the last, incomplete batch up with samples that it had before" in cause(filled, short)


def test_a_last_update_without_samples_of_before_is_not_called_filled_up() -> None:
    assert "drop_last" in cause(trace("s8"), trace("s8", "s9", "s10", "s11"))
