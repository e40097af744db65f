"""Connections to many Ray nodes end beside one another."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_clusters._ray.gathering import RayAgents
from mtrain_clusters._ray.wire import Wire

COUNT = 5


class Actor:
    """The actor of a node whose agent hangs: it is gone once Ray has ended it."""

    def __init__(self, name: str, happened: list[str]) -> None:
        self.gone = threading.Event()
        self._name, self._happened = name, happened

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method))

    def _call(self, method: str) -> Any:
        if method == "kill":
            self._happened.append(f"asked {self._name}")
        return self, method


class Ray:
    """Answers calls of actors; nothing of those that hang."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def get(self, reference: tuple[Actor, str], timeout: float | None = None) -> Any:
        actor, method = reference
        if method in ("node", "send", "close"):
            return "node"
        if not actor.gone.wait(timeout):
            raise TimeoutError
        raise RuntimeError("The actor died because it was killed")

    def wait(self, references: list[Any], *, num_returns: int, timeout: float) -> None:
        self._happened.append(f"waited for {num_returns}")
        assert len(references) == num_returns

    def kill(self, actor: Actor) -> None:
        self._happened.append(f"killed {actor._name}")
        actor.gone.set()


def test_agents_that_hang_are_all_asked_to_end_before_the_first_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtrain_clusters._ray.gathering.CLOSING_S", 0.1)
    happened: list[str] = []
    names = [f"n{number}" for number in range(COUNT)]
    placement: Any = SimpleNamespace(ray=Ray(happened), address=str, is_dead=lambda node: True)
    agents = RayAgents(SimpleNamespace(agent=["python"]), None, address="auto")  # type: ignore[arg-type]
    actors = [Actor(name, happened) for name in names]
    agents._wires = {node: Wire(placement, actor, host=actor._name) for node, actor in enumerate(actors)}
    agents.let_go(range(COUNT))
    asked, killed = [f"asked {name}" for name in names], [f"killed {name}" for name in names]
    assert happened == [*asked, f"waited for {COUNT}", *killed]
    assert not any(
        thread.name.endswith(tuple(f"Ray node {name}" for name in names)) for thread in threading.enumerate()
    )
    assert agents._wires == {}
