"""A path that no file can have is one error wherever a path is taken from a spec, a flag or a folder."""

import errno
import os

import pytest

from mtrain.commands import main
from mtrain.spec.files import path_problem
from mtrain.spec.pathnames import problem_of

PATHS = {"long": "x" * 5000, "deep": "/".join(["x" * 200] * 25), "null": "a\0b"}
COMMANDS = {
    "data.root": ["plan", "-c", "digits", "-o", "data.root={}"],
    "data.train": ["plan", "-c", "digits", "-o", "data.train={}"],
    "data.cache_dir": ["plan", "-c", "digits", "-o", "data.cache_dir={}"],
    "model.weights": ["plan", "-c", "digits", "-o", "model.weights={}"],
    "report.dir": ["plan", "-c", "digits", "-o", "report.dir={}"],
    "cluster.log_dir": ["plan", "-c", "digits", "-o", "cluster.log_dir={}"],
    "checkpoint.copy_to": ["plan", "-c", "digits", "-o", "checkpoint.copy_to=file://{}"],
    "backend.python": ["plan", "-c", "digits", "-o", "backend.python={}"],
    "plugins": ["plan", "-c", "digits", "-o", "plugins={}"],
    "own model": ["plan", "-c", "digits", "-o", "model.name={}.py:Own"],
    "own data": ["plan", "-c", "digits", "-o", "data.format={}.py:Own"],
    "-c": ["plan", "-c", "{}.yml"],
    "--run": ["evaluate", "--run", "{}"],
    "--resume": ["train", "--resume", "{}"],
    "predict": ["predict", "--run", "x", "{}"],
    "predict --weights": ["predict", "--weights", "{}.onnx", "."],
    "weights show": ["weights", "show", "{}"],
    "export": ["export", "--run", "{}"],
    "quantise": ["quantise", "--weights", "{}.onnx"],
    "report": ["report", "{}"],
    "checkpoint verify": ["checkpoint", "verify", "{}"],
    "run": ["run", "--backend", "solo", "{}.py"],
    "ui": ["ui", "{}"],
    "config import": ["config", "import", "{}"],
    "data make": ["data", "make", "digits", "{}"],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_no_file_can_have_is_one_error(command, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(PATHS[path]) for word in COMMANDS[command]]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "rror: " in printed


def test_paths_that_files_have_are_taken_and_longer_ones_are_not(tmp_path):
    for name in ("x" * 255, "é" * 127, "\udce9.png", "a b", "."):
        assert problem_of(name) == ""
        assert problem_of(f"/data/{name}/x") == ""
    assert problem_of("é" * 128), "it has 256 bytes"
    assert problem_of("/".join(["x" * 255] * 17))


def test_only_errors_of_paths_are_the_users(tmp_path):
    with pytest.raises(OSError, match="too long") as caught:
        (tmp_path / PATHS["long"]).stat()
    assert "characters are too long for a path" in path_problem(caught.value)
    with pytest.raises(ValueError, match="null") as null:
        os.stat("a\0b")
    assert path_problem(null.value)
    assert not path_problem(OSError(errno.ECHILD, "no child processes"))
    assert not path_problem(ValueError("something else"))
