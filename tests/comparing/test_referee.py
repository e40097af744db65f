"""Where backends differ, float64 shows the inexact one, and a nudged job the expected effect of rounding."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain.compare import tables, wording
from mtrain.compare.page import page
from mtrain.compare.profiles import PROFILES, violations
from mtrain.compare.referee import EXACT, Referee, with_measured_bounds
from mtrain.compare.results import Against, BackendRow, Comparison
from mtrain.compare.speed import speed_of
from mtrain.core.state.nudge import nudge_weights
from mtrain_trace.comparing import compare
from mtrain_trace.differences import GRADIENT, LOSS, WEIGHTS, gaps
from mtrain_trace.reading import Trace
from mtrain_trace.rounding import GROWTH
from tests.comparing.jobs import Planted, run
from tests.comparing.test_report import history

EXACTLY = run(Planted())


def off_by(size: float) -> Trace:
    """A job whose gradients have the wrong length by a share of ``size``."""
    return run(Planted(gradient_factor=1 + size))


def settled(jobs: dict[str, Trace], *, nudge: Trace | None = None, exact: dict[str, Trace] | None = None) -> Comparison:
    """A comparison of ``jobs`` with a float64 that is ``EXACTLY``."""
    (label, first), *others = jobs.items()
    referee = Referee(
        exact={label: EXACTLY, **(exact or {})},
        label=label,
        nudge=None if nudge is None else gaps(first, nudge),
    )
    profile = with_measured_bounds(PROFILES["float32"], referee)
    against = {
        name: Against(difference=(found := compare(first, trace)), beyond=violations(found.gaps, profile), causes=[])
        for name, trace in others
    }
    speed = speed_of([history([0.1] * 12)], started=[99.0], batch=8, timed=True)
    rows = [BackendRow(label=name, outcome="done", ranks=2, trace=trace, speed=speed) for name, trace in jobs.items()]
    return Comparison(
        title="net", source="a.yml", facts={}, profile=profile, updates=12, rows=rows, against=against, referee=referee
    )


def told(result: Comparison) -> str:
    return " / ".join(sentence.text for sentence in wording.summary(result))


def test_float64_shows_that_the_reference_is_the_wrong_one() -> None:
    result = settled({"one": off_by(1e-2), "two": EXACTLY})
    assert not result.agree
    assert wording.headline(result) == "one is off: too far from float64 in update 1"
    assert "one is off: gradient norm of update 1 9.9e-03 from float64, allowed 3e-05" in told(result)
    assert "gradient norm off from float64 (2.203856): one 9.9e-03, two 0.0e+00" in told(result)
    assert result.verdict(result.rows[0]) == "reference, inexact"
    assert "one is off" in page(result)
    columns, rows = tables.agreement(result)
    assert [row[columns.index("norm off float64")] for row in rows] == ["9.9e-03", "0"]


def test_float64_shows_that_another_backend_is_the_wrong_one() -> None:
    result = settled({"one": EXACTLY, "two": off_by(1e-4)})
    assert wording.headline(result) == "two is off: too far from float64 in update 1"
    assert result.verdict(result.rows[1]) == "inexact"
    assert result.as_json()["backends"][1]["from_float64"][GRADIENT] == pytest.approx(1e-4, rel=1e-2)


def test_backends_within_their_bounds_agree_and_their_distances_are_reported() -> None:
    near = off_by(1e-6)
    result = settled({"one": EXACTLY, "two": near}, nudge=off_by(1e-6))
    assert result.agree
    assert "gradient norm off from float64 (2.203856): two 1.0e-06, one 0.0e+00" in told(result)


def test_the_page_folds_the_distances_from_float64_unless_a_backend_is_off() -> None:
    text = "gradient norm off from float64 (2.203856): two 1.0e-06"
    folded = page(settled({"one": EXACTLY, "two": off_by(1e-6)}, nudge=off_by(1e-6))).split("<details>")[1]
    assert text in folded.split("</details>")[0]
    summary = page(settled({"one": EXACTLY, "two": off_by(1e-4)})).split("<section>")[0]
    assert "gradient norm off from float64 (2.203856): two 1.0e-04" in summary
    assert "<details>" not in summary


def test_a_gradient_norm_that_is_not_finite_counts_as_wrong() -> None:
    first, *others = EXACTLY.updates
    broken = replace(EXACTLY, updates=[replace(first, told_norm=np.nan), *others])
    result = settled({"one": EXACTLY, "two": broken})
    assert not result.agree
    assert list(result.off) == ["two"]


def test_a_difference_in_float64_is_not_called_rounding() -> None:
    wrong = off_by(1.0)
    assert "two differs from one in float64 too (gradient norm 5.0e-01 apart), so this is not rounding" in told(
        settled({"one": EXACTLY, "two": wrong}, exact={"two": wrong})
    )


def test_bounds_grow_with_the_difference_that_nudged_weights_cause() -> None:
    actual = gaps(EXACTLY, off_by(1e-4))
    referee = Referee(exact={"one": EXACTLY}, label="one", nudge=actual)
    profile = with_measured_bounds(PROFILES["float32"], referee)
    fixed = PROFILES["float32"].throughout
    assert profile.throughout[WEIGHTS] == fixed[WEIGHTS], "a small nudge narrows no bound on later updates"
    far = with_measured_bounds(PROFILES["float32"], replace(referee, nudge=(wide := gaps(EXACTLY, off_by(0.1)))))
    assert far.throughout[WEIGHTS] == pytest.approx(GROWTH * wide[WEIGHTS].largest)
    assert profile.at_start[LOSS] == 2 * EXACT
    assert profile.at_start[GRADIENT] == pytest.approx(2 * GROWTH * 1e-4, rel=1e-2)
    assert with_measured_bounds(PROFILES["float32"], replace(referee, nudge=None)) == PROFILES["float32"]


def test_a_nudge_moves_trained_weights_by_one_unit_in_the_last_place_and_nothing_else() -> None:
    weights = {
        "w": np.array([[1.0, -2.5], [0.0, 3e-3]], np.float32), "mean": np.ones(2, np.float32), "count": np.array(3),
    }  # fmt: skip
    moved = nudge_weights(weights, {"w"})
    assert moved["count"] == 3
    assert (moved["mean"] == 1).all()
    assert moved["w"][1, 0] == 0
    away = np.abs(moved["w"] - weights["w"])[weights["w"] != 0]
    # Below a power of two the unit is half as large.
    assert (away > 0).all()
    assert (away <= np.spacing(np.abs(weights["w"][weights["w"] != 0]))).all()


def deciding(trace: Trace, decided: list[str]) -> Trace:
    first, *others = trace.updates
    return replace(trace, updates=[replace(first, decided=decided), *others])


def test_predictions_that_were_compared_with_other_objects_are_counted_and_are_no_verdict() -> None:
    apart = deciding(off_by(1e-2), ["a", "x", "c"])
    exact = deciding(EXACTLY, ["a", "b", "c"])
    result = settled({"one": apart, "two": apart}, exact={"one": exact})
    assert result.decided_otherwise == {"one": 1, "two": 1}
    assert result.off == {}
    assert (
        "one: in update 1 the predictions for 1 of 3 samples are compared with other objects than in float64"
        in told(result)
    )
    assert [row["decided_otherwise"] for row in result.as_json()["backends"]] == [1, 1]
    same = settled({"one": deciding(apart, ["a", "b", "c"]), "two": exact}, exact={"one": exact})
    assert list(same.off) == ["one"], "the same decisions, and so an inexact backend"
    assert "other objects" not in told(same)
