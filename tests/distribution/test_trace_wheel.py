"""The wheel of `mtrain-trace`: its files, and recording that a variable alone switches on."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from tests.starts import starts_processes

PACKAGE = Path(__file__).parents[2] / "packages" / "mtrain-trace"
SCRIPT = """
import sys, torch
weights = torch.nn.Parameter(torch.ones(2))
weights.sum().backward()
torch.optim.SGD([weights], 0.1).step()
print([name for name in sys.modules if name.startswith("mtrain")])
"""


def tracked() -> list[str]:
    """Files of the package: those that git tracks, and those that it would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (PACKAGE / name).is_file()]


@pytest.fixture(scope="module")
@starts_processes
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution builds, as `make dist` does: without it, no file would show to be missing there."""
    source, out = tmp_path_factory.mktemp("source") / "mtrain-trace", tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((PACKAGE / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and torch and numpy of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    beside = {str(Path(module.__file__ or "").parents[1]) for module in (torch, numpy)}
    (packages / "beside.pth").write_text("\n".join(beside))
    return folder / "bin" / "python"


def test_the_wheel_has_every_file_of_the_package_and_the_startup_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (archive.read(name) for name in archive.namelist() if name.endswith("/LICENSE"))
    sources = [name for name in tracked() if name.startswith("src/")]
    expected = {name.removeprefix("src/"): (PACKAGE / name).read_bytes() for name in sources}
    expected["mtrain_trace.pth"] = (PACKAGE / "mtrain_trace.pth").read_bytes()
    assert packed == expected
    assert licence == (PACKAGE.parents[1] / "LICENSE").read_bytes()


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
