"""The wheel of `mtrain-trace`: recording that a variable alone switches on."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch

from tests.distribution.building import Built
from tests.starts import starts_processes

SCRIPT = """
import sys, torch
weights = torch.nn.Parameter(torch.ones(2))
weights.sum().backward()
torch.optim.SGD([weights], 0.1).step()
print([name for name in sys.modules if name.startswith("mtrain")])
"""


@pytest.fixture(scope="module")
@starts_processes
def python(built: Mapping[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and torch and numpy of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        packages,
        built["mtrain_trace"].wheel,
    ]
    subprocess.run(pip, check=True, capture_output=True)
    beside = {str(Path(module.__file__ or "").parents[1]) for module in (torch, numpy)}
    (packages / "beside.pth").write_text("\n".join(beside))
    return folder / "bin" / "python"


def run(python: Path, here: Path, **variables: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", SCRIPT], cwd=here, env={**clean, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_variable_alone_switches_recording_on(python: Path, tmp_path: Path) -> None:
    run(python, tmp_path, MTRAIN_TRACE=str(tmp_path / "t"))
    assert len(list((tmp_path / "t").glob("rank-00000-*/updates.jsonl"))) == 1


def test_without_the_variable_nothing_is_imported(python: Path, tmp_path: Path) -> None:
    assert run(python, tmp_path) == "[]\n"
    assert not list(tmp_path.iterdir())


def test_the_command_of_the_wheel_records_and_joins_once(python: Path, tmp_path: Path) -> None:
    # The installed startup file and the folder in PYTHONPATH meet in one process.
    words = [python, "-m", "mtrain_trace", "run", "--out", tmp_path / "t", "--", python, "-c", SCRIPT]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 update of 1 process in" in done.stderr, done.stderr
