"""Calls to a service that is down for a while: how long is waited, and what arrives."""

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_ui.trackers import background
from mtrain_ui.trackers.background import MAX_PAUSE_S, Background


class Service:
    """Fails in the calls whose numbers are in ``failing``, and keeps what arrives."""

    def __init__(self, failing: Iterable[int]) -> None:
        self._failing, self._calls = set(failing), 0
        self.arrived: list[Any] = []

    def call(self, value: Any) -> Any:
        def made() -> None:
            self._calls += 1
            if self._calls in self._failing:
                raise ConnectionError("refused")
            self.arrived.append(value)

        return made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, none of which lasts."""
    found: list[float] = []
    monkeypatch.setattr(background, "time", SimpleNamespace(sleep=found.append, monotonic=time.monotonic))
    return found


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_recovery(pauses: list[float]) -> None:
    service = Service([1, 2, 3, 6, 7, *range(9, 17)])
    calls = Background(service.call("open"), is_down=lambda error: True, first_pause_s=2.0)
    for value in "abcd":
        calls.add(service.call(value))
    assert calls.close(timeout_s=60) == 0
    assert service.arrived == ["open", *"abcd"]
    assert pauses == [2, 4, 8, 2, 4, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    assert "ConnectionError" in calls.take_sentence() or "refused" in calls.take_sentence()


def test_what_a_service_refuses_is_dropped_alone(pauses: list[float]) -> None:
    service = Service([3])
    calls = Background(service.call("open"), is_down=lambda error: False)
    for value in "abc":
        calls.add(service.call(value))
    assert calls.close(timeout_s=60) == 0
    assert (service.arrived, pauses) == (["open", "a", "c"], [])


def test_nothing_is_called_after_a_refused_opening() -> None:
    service = Service([1])
    calls = Background(service.call("open"), is_down=lambda error: False)
    calls.add(service.call("a"))
    assert calls.close(timeout_s=60) > 0
    assert isinstance(calls.refused, ConnectionError)
    assert service.arrived == []


def test_more_calls_than_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 3)
    may_go, service = threading.Event(), Service([])
    calls = Background(may_go.wait, is_down=lambda error: False)
    for value in "abcd":
        calls.add(service.call(value))
    may_go.set()
    assert calls.close(timeout_s=60) == 2
    assert service.arrived == ["a", "b"]
