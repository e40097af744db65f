"""The limits of a profile: at each bound, beyond it, and for a job that is not finite."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain.comparing.differences import LOSS, NORM, Difference, Gap, difference
from mtrain.comparing.profiles import PROFILES, Profile, violations
from mtrain.comparing.traces import BUFFERS, EMA, MOMENTS, WEIGHTS, Trace
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


def test_float32_bounds_every_quantity_of_the_first_update() -> None:
    assert set(PROFILES["float32"].at_start) == {LOSS, NORM, MOMENTS, WEIGHTS, BUFFERS}
    assert set(PROFILES["float32"].throughout) == {LOSS, WEIGHTS, EMA}


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
