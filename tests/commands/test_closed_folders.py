"""Folders that the user may not enter or read are one error in every command that takes a run or a checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

LIMITED = ("dac_override", "dac_read_search")
"""What lets root enter every folder."""
COMMANDS = {
    "train": ["train", "-c", "digits", "--resume", "{}"],
    "train, of its own spec": ["train", "--resume", "{}"],
    "run": ["run", "--resume", "{}", "x.py"],
    "plan": ["plan", "-c", "digits", "--resume", "{}"],
    "resume a checkpoint": ["train", "-c", "digits", "--resume", "{}/checkpoints/step-00000001"],
    "weights of a run": ["train", "-c", "digits", "-o", "model.weights={}"],
    "report.dir": ["train", "-c", "digits", "-o", "report.dir={}"],
    "status": ["status", "--dir", "{}"],
    "report": ["report", "{}"],
    "evaluate": ["evaluate", "{}"],
    "evaluate a checkpoint": ["evaluate", "--checkpoint", "{}"],
    "export": ["export", "{}"],
    "export a checkpoint": ["export", "--checkpoint", "{}"],
    "predict": ["predict", "{}"],
    "compare": ["compare", "{}", "{}"],
    "checkpoint list": ["checkpoint", "list", "{}"],
    "checkpoint verify": ["checkpoint", "verify", "{}"],
    "quantise": ["quantise", "{}"],
    "weights show": ["weights", "show", "{}"],
    "ui": ["ui", "{}", "--port", "0"],
}
SOURCE = """
import json, sys
from mtrain.commands import main
for name, words in json.loads(sys.argv[1]).items():
    print("command:", name, file=sys.stderr, flush=True)
    print("exit code:", main(words), file=sys.stderr, flush=True)
"""


def without_privileges() -> list[str]:
    """Return the beginning of a command that root's right to enter every folder is taken from."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root enters every folder, and setpriv, which takes the right away, is not installed")
    dropped = ",".join(f"-{name}" for name in LIMITED)
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"]


def said(folder: Path, run: Path, commands: dict[str, list[str]]) -> dict[str, str]:
    """Return what each command has said of the run, and its exit code, from one process in ``folder``."""
    words = {name: [word.format(run) for word in line] for name, line in commands.items()}
    line = [*without_privileges(), sys.executable, "-c", SOURCE, json.dumps(words)]
    printed = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=240, check=False).stderr
    parts = [part.partition("\n") for part in printed.split("command: ")[1:]]
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("kind", ["closed", "listed", "below"])
def test_a_run_that_may_not_be_entered_is_one_error(tmp_path, kind):
    run = tmp_path / "kept" / "secret"
    (run / "checkpoints").mkdir(parents=True)
    closed, mode = {"closed": (run, 0), "listed": (run, 0o444), "below": (run.parent, 0)}[kind]
    closed.chmod(mode)
    try:
        results = said(tmp_path, run, {k: v for k, v in COMMANDS.items() if kind != "listed" or k != "ui"})
    finally:
        closed.chmod(0o700)
    assert set(results) >= COMMANDS.keys() - {"ui"}
    for name, text in results.items():
        assert "Traceback" not in text, name
        # A comparison that cannot be made is no verdict; a folder that the command line cannot take is wrong use.
        code = 3 if name == "compare" and kind != "closed" else 2
        assert text.rstrip().endswith(f"exit code: {code}"), (name, text)
        (line,) = [each for each in text.splitlines() if each.startswith("error: ")]
        assert "secret" in line, name


def test_checkpoints_that_may_not_be_read_are_not_taken_for_none(tmp_path):
    run = tmp_path / "secret"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "checkpoints").chmod(0)
    commands = {name: COMMANDS[name] for name in ("evaluate", "export", "checkpoint list", "checkpoint verify")}
    try:
        results = said(tmp_path, run, commands)
    finally:
        (run / "checkpoints").chmod(0o700)
    assert results.keys() == commands.keys()
    for name, text in results.items():
        assert "secret/checkpoints: Permission denied; change its mode" in text, (name, text)
        assert text.rstrip().endswith("exit code: 2"), name
