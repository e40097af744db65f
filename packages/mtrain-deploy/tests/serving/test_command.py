"""`mtrain serve RUN` exports the run and serves the file."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import mtrain_deploy.serving
from mtrain.commands import main
from mtrain_deploy.exporting import job


@pytest.fixture
def asked(monkeypatch):
    """What was exported and served, in this order."""
    asked: list = []
    monkeypatch.setattr(
        job,
        "export_weights",
        lambda request: asked.append((request.run, request.out)) or SimpleNamespace(code=request.run == "bad"),
    )
    monkeypatch.setattr(mtrain_deploy.serving, "serve", lambda weights, **_: asked.append(weights) or 0)
    return asked


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["runs/a"], [("runs/a", Path("runs/a/served.onnx")), "runs/a/served.onnx"]),
        ([], [(None, Path("runs/latest/served.onnx")), "runs/latest/served.onnx"]),
        (["a.onnx"], ["a.onnx"]),
        (["--weights", "a.onnx"], ["a.onnx"]),
    ],
)
def test_a_run_is_exported_first_and_a_file_is_served_as_it_is(words, expected, asked):
    assert main(["serve", *words]) == 0
    assert asked == expected


def test_an_export_that_fails_serves_nothing_and_two_models_are_refused(asked, capsys):
    assert main(["serve", "bad"]) == 1
    assert len(asked) == 1
    assert main(["serve", "runs/a", "--weights", "a.onnx"]) == 2
    assert "two models are given: runs/a and --weights a.onnx; keep one" in capsys.readouterr().err
