"""A folder with the plugins of `outside`, in which mtrain is run as a command."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of `outside`."""
    shutil.copytree(OUTSIDE, tmp_path / "work", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """The end of a command, whatever its exit code."""
    return subprocess.run([sys.executable, "-m", "mtrain", *words], capture_output=True, text=True, timeout=300)


def says(*words: str) -> str:
    """What a command prints that succeeds."""
    process = run(*words)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
