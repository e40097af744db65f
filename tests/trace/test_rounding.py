"""Rounding is told from a mistake by its size, by its growth, and by what grows out of one unit in the last place."""

import math
from pathlib import Path

import numpy as np
import pytest

from mtrain_trace.comparing import Comparison, compare
from mtrain_trace.differences import CLIP, LOSS, WEIGHTS, Gap, gaps
from mtrain_trace.reading import ArrayRow, Trace, Update
from mtrain_trace.rounding import GROWTH, JUMP, Rounding

LENGTH = 16


def row(digest: int, value: float) -> ArrayRow:
    return ArrayRow(digest, abs(value), [value] + [0.0] * (LENGTH - 1))


def training(updates: list[Update]) -> Trace:
    described = {"rule": "SGD", "groups": [["w"]], "shapes": {"w": [1]}, "dtypes": ["float32"], "sharded": False}
    process = {"rank": 0, "ranks": 1, "optimizers": [described]}
    return Trace(Path("t"), [process], updates, {"w": row(1, 1.0)})


def update(number: int = 1, *, weight: float = 2.0, gradient: int = 5, before: float | None = None) -> Update:
    """An update whose weight has come from 1.0; equal values have equal bits."""
    clip = None if before is None else {"before": before, "limit": 0.5}
    parts = {"weights": row(hash(weight) % 2**64, weight), "gradients": row(gradient, 1.0 + gradient * 1e-9)}
    return Update(number, losses=[1.0], clips=[clip], parts=parts)


def beside(ours: Update, theirs: Update) -> Comparison:
    return compare(training([ours]), training([theirs]))


def test_a_small_difference_is_a_mistake_where_all_before_has_the_same_bits_and_rounding_after_rounding() -> None:
    apart = 2.0 + 5e-3  # a two hundredth of the way from 1.0
    found = beside(update(), update(weight=apart)).parting
    assert found is not None
    assert found.what == WEIGHTS
    rounded = beside(update(), update(weight=apart, gradient=6))
    assert rounded.parting is None
    assert rounded.verdict == "same up to rounding"


def test_rounding_may_grow_and_a_jump_is_a_mistake() -> None:
    rounding, seen = Rounding(), {LOSS: 1e-4}
    assert rounding.limit(LOSS, 3, seen, alike=False) == pytest.approx(JUMP * 1e-4)
    assert rounding.limit(LOSS, 0, seen, alike=False) == 1e-5, "nothing has grown before the first update"
    assert rounding.limit(LOSS, 3, {LOSS: 0.5}, alike=False) == 1.0


def test_what_grows_out_of_a_nudge_takes_the_place_of_the_guess() -> None:
    nudged = {WEIGHTS: Gap(0, np.array([0.01, 0.02, math.nan]))}
    rounding, seen = Rounding(nudged=nudged), {WEIGHTS: 0.5}
    assert rounding.limit(WEIGHTS, 1, seen, alike=False) == pytest.approx(GROWTH * 0.02)
    assert rounding.limit(WEIGHTS, 2, seen, alike=False) == 1.0, "it was not recorded there"
    assert rounding.limit(LOSS, 1, {LOSS: 1e-3}, alike=False) == pytest.approx(JUMP * 1e-3)


def test_a_gradient_at_the_limit_of_clipping_is_not_clipped_otherwise() -> None:
    above, below = update(before=0.50000001), update(before=0.49999999)
    assert gaps(training([above]), training([below]))[CLIP].curve[0] < 1e-7
    assert gaps(training([above]), training([update()]))[CLIP].curve[0] == math.inf
    unknown = update()
    unknown.clips = []
    assert math.isnan(gaps(training([above]), training([unknown]))[CLIP].curve[0])


def test_arrays_of_other_names_are_not_compared_and_that_is_said() -> None:
    ours, theirs = training([update()]), training([update(weight=7.0)])
    theirs.processes[0]["optimizers"][0] |= {"groups": [["inner.w"]], "shapes": {"inner.w": [1]}}
    theirs.start = {"inner.w": row(9, 1.0)}
    found = compare(ours, theirs)
    assert found.parting is None
    assert "arrays have other names (w; inner.w)" in found.remarks[0]
    theirs.processes[0]["optimizers"][0]["shapes"] = {"inner.w": [2]}
    assert compare(ours, theirs).parting is not None
