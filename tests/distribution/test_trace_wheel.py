"""The small wheel `mtrain-trace`: the same files as in mtrain's, and recording that a variable alone switches on."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
weights = torch.nn.Parameter(torch.ones(2))
weights.sum().backward()
torch.optim.SGD([weights], 0.1).step()
print([name for name in sys.modules if name.startswith("mtrain")])
"""


@pytest.fixture(scope="module")
@starts_processes
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "scripts" / "trace-source", ROOT, source], check=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, source]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the small wheel, and torch and numpy of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    beside = {str(Path(module.__file__ or "").parents[1]) for module in (torch, numpy)}
    (packages / "beside.pth").write_text("\n".join(beside))
    return folder / "bin" / "python"


def test_both_wheels_have_the_same_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "mtrain_trace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {name: (ROOT / name).read_bytes() for name in listed.stdout.split()}
    expected["mtrain_trace.pth"] = (ROOT / "distribution" / "mtrain_trace.pth").read_bytes()
    assert packed == expected


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
    assert "1 updates of 1 process(es)" in done.stderr, done.stderr
