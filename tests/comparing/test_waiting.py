"""Measurement of the time spent waiting for other ranks."""

import pytest

from mtrain.backends import waiting
from mtrain.backends.waiting import Waits


class Clock:
    """Moves by what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Calls that take a while."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def meet(self) -> str:
        self.clock.now += 1
        return "met"

    def gather(self, times: int, *, fails: bool = False) -> list[str]:
        self.clock.now += 10
        actual = [self.meet() for _ in range(times)]
        if fails:
            raise OSError("gone")
        return actual


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "perf_counter", clock)
    return clock


def test_nested_calls_are_timed_once(clock):
    ranks, waits = Ranks(clock), Waits()
    waits.watch(ranks, "meet", "gather")
    assert ranks.gather(2) == ["met", "met"]
    clock.now += 100
    assert ranks.meet() == "met"
    assert waits.seconds == 13


def test_the_time_of_a_call_that_raises_is_counted(clock):
    ranks, waits = Ranks(clock), Waits()
    waits.watch(ranks, "gather")
    with pytest.raises(OSError, match="gone"):
        ranks.gather(0, fails=True)
    clock.now += 100
    ranks.gather(0)
    assert waits.seconds == 20


def test_watched_functions_can_be_restored(clock):
    waits, before = Waits(), Ranks.meet
    waits.watch(Ranks, "meet")
    Ranks(clock).meet()
    waits.release()
    Ranks(clock).meet()
    assert waits.seconds == 1
    assert Ranks.meet is before


def test_one_rank_never_waits_and_reports_waiting_only_on_request(framework):
    with framework.solo() as session:
        assert "communication_s" not in session.measure()
        session.time_waits()
        session.collective.all_gather("x")
        assert session.measure()["communication_s"] == 0
