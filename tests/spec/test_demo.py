"""The backend of the embedded demo in environments that lack a library."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from mtrain.spec import config, plugins


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "find_spec", lambda name: None if name == "torch" else find_spec(name))


@pytest.mark.usefixtures("without_torch")
def test_the_demo_trains_on_a_backend_whose_library_is_installed() -> None:
    demo = config.load(None, environ={})
    assert demo.spec.backend.name == "fleet"
    assert demo.notes == ("the demo trains on fleet, because torch is not installed, which ddp needs",)
    assert str(demo.origin("backend.name")) == "chosen for the demo: no torch here"


@pytest.mark.usefixtures("without_torch")
def test_a_backend_or_interpreter_that_was_named_is_kept(tmp_path: Path) -> None:
    assert config.load(None, flags={"backend.name": "solo"}, environ={}).spec.backend.name == "solo"
    assert config.load(None, overrides=["backend.python=/opt/python"], environ={}).spec.backend.name == "ddp"
    assert config.load("digits", environ={}).spec.backend.name == "ddp"
    (tmp_path / "mtrain.yml").write_text("_BASE_: digits\n", encoding="utf-8")
    assert config.load(None, environ={}).spec.backend.name == "ddp"


def test_the_default_backend_stays_where_it_can_train_and_where_none_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "find_spec", lambda _: "found")
    assert config.load(None, environ={}).spec.backend.name == "ddp"
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    assert config.load(None, environ={}).spec.backend.name == "ddp"
