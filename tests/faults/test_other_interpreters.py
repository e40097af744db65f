"""`backend.python`: fleet on an interpreter without torch and another Paddle, ddp on one without Paddle."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.faults.conftest import UPDATES

ROOT = Path(__file__).parents[2]
INTERPRETERS = {"fleet": ROOT / ".venv-paddle2", "ddp": ROOT / ".venv-torch"}
ABSENT = {"fleet": "torch", "ddp": "paddle"}


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fleet", marks=pytest.mark.slow)])
def test_ranks_train_on_the_interpreter_that_the_spec_names(runner, backend):
    python = INTERPRETERS[backend] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parents[1].name} is not here: `make test-others` makes it")
    lacking = f"import importlib.util as u; print(u.find_spec({ABSENT[backend]!r}))"
    # Not from this folder: a `torch` beside the working directory would be found.
    actual = subprocess.run([python, "-c", lacking], capture_output=True, text=True, check=True, cwd=os.sep)
    assert actual.stdout.strip() == "None"
    name = f"elsewhere-{backend}"
    code, output = runner.run([*runner.arguments(backend=backend, name=name), "-o", f"backend.python={python}"])
    assert code == 0, output
    assert runner.summary(name)["updates"] == UPDATES
    plan = json.loads((runner.run_folder(name) / "plan.json").read_text())
    assert all(
        word.startswith(str(python))
        for command in plan["commands"]
        for word in command["argv"]
        if "/bin/python" in word
    )
