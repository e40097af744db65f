"""The limits of a profile: at each bound, beyond it, and for a job that is not finite."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from mtrain.compare.profiles import PROFILES, Profile, violations
from mtrain.compare.traces import trace_of
from mtrain.core.state.trace import SIZE
from mtrain.records.history import History
from mtrain_trace.comparing import compare
from mtrain_trace.differences import BUFFERS, GRADIENT, LOSS, MOMENTS, WEIGHTS, Gap, gaps
from mtrain_trace.reading import AVERAGE, Trace
from tests.comparing.jobs import run

UPDATES = 5
BOUNDED = [
    (profile.name, when, name)
    for profile in PROFILES.values()
    for when, bounds in (("at_start", profile.at_start), ("throughout", profile.throughout))
    for name in bounds
    if profile.name != "bitwise"
]


def apart(name: str, update: int, size: float) -> dict[str, Gap]:
    """Two jobs that differ in one quantity of one update."""
    curve = np.zeros(UPDATES)
    curve[update] = size
    return {
        "start weights": Gap(first=None, curve=np.zeros(0)),
        "samples": Gap(first=None, curve=np.zeros(0)),
        name: Gap(first=update, curve=curve),
    }


@pytest.mark.parametrize(("profile", "when", "name"), BOUNDED)
def test_a_difference_up_to_its_bound_is_allowed_and_one_beyond_it_is_not(profile: str, when: str, name: str) -> None:
    chosen: Profile = PROFILES[profile]
    update, bound = (0, chosen.at_start[name]) if when == "at_start" else (UPDATES - 1, chosen.throughout[name])
    assert violations(apart(name, update, 0.99 * bound), chosen) == []
    assert len(violations(apart(name, update, 1.01 * bound), chosen)) == 1


@pytest.mark.parametrize(
    ("name", "rounding", "fault"),
    [(LOSS, 2e-6, 1e-4), (GRADIENT, 2e-5, 1e-3), (MOMENTS, 1e-4, 1e-2), (WEIGHTS, 1e-4, 1e-2), (BUFFERS, 1e-4, 1e-2)],
)
def test_float32_tells_rounding_from_the_thousandth_part_of_a_gradient(
    name: str, rounding: float, fault: float
) -> None:
    """A job whose norm is a thousandth off has left out a sample of a thousand; rounding is fifty times smaller."""
    assert violations(apart(name, 0, rounding), PROFILES["float32"]) == []
    assert len(violations(apart(name, 0, fault), PROFILES["float32"])) == 1


def test_float32_bounds_every_quantity_of_the_first_update() -> None:
    assert set(PROFILES["float32"].at_start) == {LOSS, GRADIENT, MOMENTS, WEIGHTS, BUFFERS}
    assert set(PROFILES["float32"].throughout) == {LOSS, WEIGHTS, BUFFERS, AVERAGE}


@pytest.mark.parametrize("name", [LOSS, GRADIENT, MOMENTS, WEIGHTS, BUFFERS])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_first_update_that_is_not_finite_in_one_job_alone_is_beyond_float32(name: str, value: float) -> None:
    assert violations(apart(name, 0, value), PROFILES["float32"])


@pytest.mark.parametrize("name", [LOSS, WEIGHTS, AVERAGE])
def test_a_later_update_that_is_not_finite_in_one_job_alone_is_beyond_float32(name: str) -> None:
    assert violations(apart(name, 3, np.inf), PROFILES["float32"])


def test_numbers_and_arrays_that_are_finite_in_one_job_alone_are_infinitely_far_apart() -> None:
    start = [1.0, 0.0]
    sound, broken = still(weights_0=[start, [2.0, 0.0], start]), still(weights_0=[start, [np.nan, 0.0], start])
    assert gaps(sound, broken)[WEIGHTS].largest == np.inf
    assert gaps(sound, with_loss(sound, 1, np.nan))[LOSS].largest == np.inf


def with_loss(trace: Trace, update: int, value: float) -> Trace:
    updates = list(trace.updates)
    updates[update] = replace(updates[update], losses=[value], loss_parts={"total": value})
    return replace(trace, updates=updates)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_loss_that_is_nan_in_one_job_alone_is_no_agreement(profile: str) -> None:
    sound = run(updates=4)
    broken = with_loss(sound, 2, np.nan)
    assert violations(gaps(sound, broken), PROFILES[profile])
    assert violations(gaps(broken, sound), PROFILES[profile])


def test_a_loss_that_is_nan_in_both_jobs_is_the_same() -> None:
    broken = with_loss(run(updates=4), 2, np.nan)
    assert violations(gaps(broken, with_loss(run(updates=4), 2, np.nan)), PROFILES["bitwise"]) == []


def still(*, agree: tuple[bool, ...] = (True, True, True), **states: list[list[float]]) -> Trace:
    """A job of two updates in which only the given parts of the state move: by part, numbers before and after each."""
    rows = {part.replace("_", "/"): np.zeros((3, SIZE)) for part in states}
    for part, numbers in states.items():
        rows[part.replace("_", "/")][:, :2] = numbers
    history = History()
    for place in range(3):
        looked = {
            "digests": {
                part: hashlib.sha256(numbers[place].tobytes()).hexdigest()[:16] for part, numbers in rows.items()
            },
            "sketches": {part: numbers[place].tolist() for part, numbers in rows.items()},
            "ranks_agree": agree[place],
            "samples": f"{place}",
        }
        if place == 0:
            history.add({"kind": "start", "update": 0, "trace": looked})
            continue
        numbers = {"losses": {"total": 1.0}, "gradient_norm": 1.0, "learning_rates": [1.0]}
        history.add({"kind": "update", "update": place - 1, **numbers, "trace": looked})
    return trace_of(history)


def test_differences_of_state_are_shares_of_the_way_that_training_has_moved_it() -> None:
    """Weights move by (3, 4) twice: 5 and then 10 from the start. A momentum is measured against its own length."""
    start = [100.0, 100.0]
    a = still(weights_0=[start, [103.0, 104.0], [106.0, 108.0]], momentum_0=[[0.0, 0.0], [0.0, 4.0], [0.0, 2.0]])
    b = still(weights_0=[start, [103.0, 104.5], [106.0, 109.0]], momentum_0=[[0.0, 0.0], [0.0, 5.0], [0.0, 3.0]])
    found = gaps(a, b)
    assert found[WEIGHTS].curve == pytest.approx([0.5 / np.hypot(3, 4.5), 1.0 / np.hypot(6, 9)])
    assert found[MOMENTS].curve == pytest.approx([1.0 / 5, 1.0 / 3])
    assert (found[WEIGHTS].first, found[LOSS].first) == (0, None)


def test_a_part_that_does_not_move_is_measured_against_a_share_of_its_length() -> None:
    a = still(weights_0=[[30.0, 40.0]] * 3)
    b = still(weights_0=[[30.0, 40.0], [30.0, 40.0], [30.0, 40.0005]])
    assert gaps(a, b)[WEIGHTS].curve == pytest.approx([0.0, 0.0005 / (1e-4 * 50.0)])


def test_the_beginning_of_a_trace_has_the_state_before_and_after_each_of_its_updates() -> None:
    a = still(weights_0=[[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]])
    b = still(weights_0=[[1.0, 0.0], [2.5, 0.0], [4.0, 0.0]])
    short = a.first(1)
    assert (len(short.updates), len(short.rows(WEIGHTS, -1)), len(short.rows(WEIGHTS, 0))) == (1, 1, 1)
    found = compare(short, b.first(1))
    assert found.gaps[WEIGHTS].curve == pytest.approx([0.5 / 1.5])
    assert (found.gaps[WEIGHTS].first, found.updates) == (0, 1)
    agree = ((True, True, True), (False, True, True), (True, False, True), (True, True, False))
    numbers = [[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]]
    drifted = [still(agree=agreed, weights_0=numbers).first(1).first_drift for agreed in agree]
    assert drifted == [None, 0, 1, None]
