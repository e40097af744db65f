"""Backends and sessions that lack members are refused with one sentence; a backend may be its own session."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.core.interfaces import Backend, RankSession
from mtrain.errors import PluginError
from mtrain.rank.allreduce import allreduce
from mtrain.spec import plugins
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder
from tests.framework import Framework

PLUGIN = """
from mtrain.backends.solo import Solo
from mtrain.core.interfaces import RankSession


class Former(Solo):
    '''It is written for the seam on which a backend was its own session.'''

    def __enter__(self):
        self._entered = super().__enter__()
        return self


class Whole(Former):
    '''It is its own session, and has all members of one but those with a default.'''

    def __getattr__(self, name):
        if name in ("collective", "device", "prepare", "batches", "infer", "state", "restore", "measure"):
            return getattr(self._entered, name)
        raise AttributeError(name)


class Nothing(Former):
    '''It forgets to return the session.'''

    def __enter__(self):
        super().__enter__()


class Overriding(Solo):
    '''It overrides a member of the session where that was before.'''

    def prepare(self, build, recipe):
        return super().prepare(build, recipe)


class Packed(Whole):
    '''It has no room for it.'''

    def __setattr__(self, name, value):
        if name == "capabilities":
            raise AttributeError(name)
        super().__setattr__(name, value)


class Replaced(Whole):
    '''It has overwritten it.'''

    capabilities = None


class Derived(Former, RankSession):
    '''It inherits what has a default.'''

    def __enter__(self):
        super().__enter__()
        self.collective, self.device = self._entered.collective, self._entered.device
        return self

    def prepare(self, build, recipe):
        return self._entered.prepare(build, recipe)

    def batches(self, loader):
        return self._entered.batches(loader)

    def infer(self, model, batch):
        return self._entered.infer(model, batch)

    def state(self, model, optimizer):
        return self._entered.state(model, optimizer)

    def restore(self, model, optimizer, state):
        self._entered.restore(model, optimizer, state)

    def measure(self):
        return self._entered.measure()
"""


@pytest.fixture
def run(tmp_path: Path, framework: Framework) -> Any:
    """Run the job of ``mtrain doctor`` on one rank of a class of ``PLUGIN``; return its summary."""
    (tmp_path / "sessions.py").write_text(PLUGIN)

    def run(name: str) -> dict[str, Any]:
        policy = tmp_path / "plugins.toml"
        policy.write_text(f'[backends.{name.lower()}]\nmodule = "sessions:{name}"\n')
        spec = Spec.model_validate(
            {
                "backend": {"name": name.lower(), "options": {"device": "cpu", "framework": framework.name}},
                "plugins": str(policy),
                "data": {"format": "digits"},
                "model": {"name": "yolov5n"},
            }
        )
        allreduce(Resolved.of(spec), RunFolder(tmp_path), leave=lambda error: None)
        summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
        return summary

    return run


@pytest.mark.parametrize("name", ["Whole", "Derived"])
def test_a_backend_with_all_members_may_be_its_own_session(run: Any, name: str) -> None:
    summary = run(name)
    assert (summary["reason"], summary["ranks"]) == ("done", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Former",
            "backend 'former': `__enter__` returned a Former without collective, device, prepare, batches, infer, state, "
            "restore, measure; return the session, such as the engine that it makes, and not the backend; "
            "see RankSession in mtrain.core.interfaces",
        ),
        (
            "Nothing",
            "backend 'nothing': `__enter__` returned None; return the session, such as the engine that it makes, and "
            "not the backend; see RankSession in mtrain.core.interfaces",
        ),
        (
            "Overriding",
            "backend 'overriding' defines prepare, but is not its own session, so nothing calls that; override it in the "
            "session that `__enter__` returns, a TorchEngine",
        ),
        (
            "Packed",
            "backend 'packed': `__enter__` returned a Packed without capabilities; derive Packed from RankSession in "
            "mtrain.core.interfaces, which has a default for it",
        ),
        (
            "Replaced",
            "backend 'replaced': `__enter__` returned a Replaced without capabilities; derive Replaced from RankSession in "
            "mtrain.core.interfaces, which has a default for it",
        ),
    ],
)
def test_what_is_not_a_session_is_refused_with_the_remedy(
    run: Any, framework: Framework, name: str, message: str
) -> None:
    with pytest.raises(PluginError) as caught:
        run(name)
    assert str(caught.value) == message.replace("Torch", framework.name.title())
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("absent", ["check", "before_script", "takes_meshes"])
def test_a_backend_without_a_member_that_has_a_default_is_refused_when_it_is_loaded(
    tmp_path: Path, absent: str
) -> None:
    members = {"nn", "ops", "check", "before_script", "takes_meshes"} - {absent}
    (tmp_path / f"without_{absent}.py").write_text(
        "from pydantic import BaseModel\nclass Partial:\n    class Options(BaseModel):\n        pass\n"
        f"    {' = '.join(sorted(members))} = None\n"
    )
    policy = tmp_path / "plugins.toml"
    policy.write_text(f'[backends.partial]\nmodule = "without_{absent}:Partial"\n')
    message = rf"has no `{absent}`: derive the class from mtrain\.core\.interfaces\.Backend"
    with pytest.raises(PluginError, match=message):
        plugins.load("backends", "partial", policy=plugins.read_policy(policy))


def test_a_derived_backend_refuses_nothing_by_default() -> None:
    class Derived(Backend):
        nn = ops = property(lambda self: None)  # type: ignore[assignment]

        def __enter__(self) -> Any: ...

        def __exit__(self, *error: object) -> None: ...

    derived: Any = Derived()
    assert derived.check(None, size=1, on_cpu=True) is None


def test_a_derived_session_must_define_all_members_without_a_default() -> None:
    with pytest.raises(TypeError, match="abstract methods batches, infer, measure, prepare, restore, state"):
        type("Empty", (RankSession,), {})()
