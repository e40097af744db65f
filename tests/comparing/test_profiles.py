"""The limits of a profile: at each bound, beyond it, and for a job that is not finite."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain.core.trace import SIZE
from mtrain.studies.compare.differences import LOSS, NORM, Difference, Gap, difference
from mtrain.studies.compare.profiles import PROFILES, Profile, violations
from mtrain.studies.compare.traces import BUFFERS, EMA, MOMENTS, WEIGHTS, Trace
from tests.comparing.jobs import run

UPDATES = 5
BOUNDED = [
    (profile.name, when, name)
    for profile in PROFILES.values()
    for when, bounds in (("at_start", profile.at_start), ("throughout", profile.throughout))
    for name in bounds
    if profile.name != "bitwise"
]


def apart(name: str, update: int, size: float) -> Difference:
    """Two jobs that differ in one quantity of one update."""
    curve = np.zeros(UPDATES)
    curve[update] = size
    return Difference(
        gaps={
            "start": Gap(first=None, curve=np.zeros(0)),
            "samples": Gap(first=None, curve=np.zeros(0)),
            name: Gap(first=update, curve=curve),
        }
    )


@pytest.mark.parametrize(("profile", "when", "name"), BOUNDED)
def test_a_difference_up_to_its_bound_is_allowed_and_one_beyond_it_is_not(profile: str, when: str, name: str) -> None:
    chosen: Profile = PROFILES[profile]
    update, bound = (0, chosen.at_start[name]) if when == "at_start" else (UPDATES - 1, chosen.throughout[name])
    assert violations(apart(name, update, 0.99 * bound), chosen) == []
    assert len(violations(apart(name, update, 1.01 * bound), chosen)) == 1


@pytest.mark.parametrize(
    ("name", "rounding", "fault"),
    [(LOSS, 2e-6, 1e-4), (NORM, 2e-5, 1e-3), (MOMENTS, 1e-4, 1e-2), (WEIGHTS, 1e-4, 1e-2), (BUFFERS, 1e-4, 1e-2)],
)
def test_float32_tells_rounding_from_the_thousandth_part_of_a_gradient(
    name: str, rounding: float, fault: float
) -> None:
    """A job whose norm is a thousandth off has left out a sample of a thousand; rounding is fifty times smaller."""
    assert violations(apart(name, 0, rounding), PROFILES["float32"]) == []
    assert len(violations(apart(name, 0, fault), PROFILES["float32"])) == 1


def test_float32_bounds_every_quantity_of_the_first_update() -> None:
    assert set(PROFILES["float32"].at_start) == {LOSS, NORM, MOMENTS, WEIGHTS, BUFFERS}
    assert set(PROFILES["float32"].throughout) == {LOSS, WEIGHTS, BUFFERS, EMA}


@pytest.mark.parametrize("name", [LOSS, NORM, MOMENTS, WEIGHTS, BUFFERS])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_first_update_that_is_not_finite_in_one_job_alone_is_beyond_float32(name: str, value: float) -> None:
    assert violations(apart(name, 0, value), PROFILES["float32"])


@pytest.mark.parametrize("name", [LOSS, WEIGHTS, EMA])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_later_update_that_is_not_finite_in_one_job_alone_is_beyond_float32(name: str, value: float) -> None:
    assert violations(apart(name, 3, value), PROFILES["float32"])


def with_loss(trace: Trace, update: int, value: float) -> Trace:
    losses = {name: series.copy() for name, series in trace.losses.items()}
    losses["total"][update] = value
    return replace(trace, losses=losses)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_loss_that_is_nan_in_one_job_alone_is_no_agreement(profile: str) -> None:
    sound = run(updates=4)
    broken = with_loss(sound, 2, np.nan)
    assert violations(difference(sound, broken), PROFILES[profile])
    assert violations(difference(broken, sound), PROFILES[profile])


def test_a_loss_that_is_nan_in_both_jobs_is_the_same() -> None:
    broken = with_loss(run(updates=4), 2, np.nan)
    assert violations(difference(broken, with_loss(run(updates=4), 2, np.nan)), PROFILES["bitwise"]) == []


def still(**states: list[list[float]]) -> Trace:
    """A job of two updates in which only the given parts of the state move: by part, numbers before and after each."""
    rows = {part.replace("_", "/"): np.zeros((3, SIZE)) for part in states}
    for part, numbers in states.items():
        rows[part.replace("_", "/")][:, :2] = numbers
    return Trace(
        losses={"total": np.ones(2)},
        norms=np.ones(2),
        rates=np.ones((2, 1)),
        momenta=[None, None],
        samples=["a", "b"],
        digests={part: [str(row[:2]) for row in numbers] for part, numbers in rows.items()},
        sketches=rows,
    )


def test_differences_of_state_are_shares_of_the_way_that_training_has_moved_it() -> None:
    """Weights move by (3, 4) twice: 5 and then 10 from the start. A momentum is measured against its own length."""
    start = [100.0, 100.0]
    a = still(weights_0=[start, [103.0, 104.0], [106.0, 108.0]], momentum_0=[[0.0, 0.0], [0.0, 4.0], [0.0, 2.0]])
    b = still(weights_0=[start, [103.0, 104.5], [106.0, 109.0]], momentum_0=[[0.0, 0.0], [0.0, 5.0], [0.0, 3.0]])
    gaps = difference(a, b).gaps
    assert gaps[WEIGHTS].curve == pytest.approx([0.5 / 5, 1.0 / 10])
    assert gaps[MOMENTS].curve == pytest.approx([1.0 / 4, 1.0 / 2])
    assert (gaps[WEIGHTS].first, gaps[LOSS].first) == (0, None)


def test_a_part_that_does_not_move_is_measured_against_a_share_of_its_length() -> None:
    a = still(weights_0=[[30.0, 40.0]] * 3)
    b = still(weights_0=[[30.0, 40.0], [30.0, 40.0], [30.0, 40.0005]])
    assert difference(a, b).gaps[WEIGHTS].curve == pytest.approx([0.0, 0.0005 / (1e-4 * 50.0)])


def test_the_beginning_of_a_trace_has_the_state_before_and_after_each_of_its_updates() -> None:
    a = still(weights_0=[[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]])
    b = still(weights_0=[[1.0, 0.0], [2.5, 0.0], [4.0, 0.0]])
    short = a.first(1)
    assert (short.updates, len(short.samples), len(short.rates), len(short.momenta)) == (1, 1, 1, 1)
    assert [len(values) for values in (*short.digests.values(), *short.sketches.values())] == [2, 2]
    assert difference(short, b.first(1)).gaps[WEIGHTS].curve == pytest.approx([0.5])
    assert difference(short, b.first(1)).gaps[WEIGHTS].first == 0
    drifted = [replace(a, drifted=after).first(1).drifted for after in (None, 0, 1, 2)]
    assert drifted == [None, 0, 1, None]
