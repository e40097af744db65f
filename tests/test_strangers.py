"""What runs the tests on other machines: scripts of `make test` and `make stranger`, and the plugins of pytest that they use."""

import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests import needs_horovod, shuffled

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


@pytest.mark.job
def test_a_process_that_a_command_leaves_is_named_and_ended_whatever_session_it_moved_to() -> None:
    script = "setsid sleep 1234.5 & (sleep 0.3 &) ; exit 0"
    done = subprocess.run([SCRIPTS / "leaves-nothing", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "still there after sh: sleep 1234.5" in done.stderr
    assert "sleep 0.3" not in done.stderr, "what ends by itself soon is waited for"
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "1234.5"]]


@pytest.mark.job
@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_the_status_of_a_command_that_leaves_nothing_is_its_own(script: str, status: int) -> None:
    done = subprocess.run([SCRIPTS / "leaves-nothing", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.job
def test_an_environment_that_could_not_be_made_is_not_taken_for_one(tmp_path: Path) -> None:
    """As under Debian without python3-venv: a Python is there, and no pip."""
    python = tmp_path / "a python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] || exit 0\nmkdir -p "$3/bin"; touch "$3/bin/python"; echo no ensurepip; exit 1\n'
    )
    python.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(
        [SCRIPTS / "make-venv", tmp_path / "made"], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 1
    assert "no ensurepip" in done.stdout
    assert not (tmp_path / "made").exists(), "make would find its python there, and go on"


def order(seed: int, tests: list[tuple[str, int]]) -> list[tuple[str, int]]:
    items = [SimpleNamespace(path=Path(file), number=number) for file, number in tests]
    config = SimpleNamespace(getoption=lambda name: seed)
    shuffled.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [(str(item.path), item.number) for item in items]


def test_a_seed_names_one_order_in_which_tests_of_a_file_stay_together() -> None:
    tests = [(f"{file}.py", number) for file in "abcdef" for number in range(8)]
    first, again, second = order(1, tests), order(1, tests), order(2, tests)
    assert first == again != second
    assert sorted(first) == sorted(second) == tests != first
    files = [file for file, _ in first]
    assert [file for at, file in enumerate(files) if at == 0 or files[at - 1] != file] == [*dict.fromkeys(files)]
    assert [number for file, number in first if file == "a.py"] != [*range(8)]


@pytest.mark.parametrize(
    ("installed", "tools", "why"),
    [
        (True, (), None),
        (False, ("cmake", "make"), "no compiler for Horovod; Debian: apt-get install g++"),
        (False, (), "no compiler for Horovod; Debian: apt-get install cmake g++ make"),
        (False, ("cmake", "g++", "make"), "Horovod is not built; run: make horovod"),
    ],
)
def test_tests_of_horovod_are_skipped_for_want_of_a_compiler_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool, tools: tuple[str, ...], why: str | None
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(needs_horovod, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(needs_horovod.shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(needs_horovod.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert needs_horovod.reason() == why
    (tmp_path / "Python.h").unlink()
    assert installed or str(needs_horovod.reason()).endswith(" python3-dev")


def test_a_stranger_has_every_kernel_every_order_and_both_clones() -> None:
    plan = runpy.run_path(str(SCRIPTS / "stranger"))["plan"]
    kernels = ["Nehalem", "Haswell", "Zen", "SkylakeX"]
    runs = plan(("/usr/bin/python3", "/usr/local/bin/python3.13"), kernels, [])
    assert [(which, target) for which, target, _ in runs[:2]] == [(0, "test"), (1, "test")]
    assert [environ["OPENBLAS_CORETYPE"] for _, _, environ in runs[2:]] == kernels
    assert {environ["PYTEST_ARGS"][-1] for _, _, environ in runs} == {"1", "2", "3"}
    assert len({environ["TZ"] for _, _, environ in runs}) == 3
    assert all(environ["PYTHON"].endswith(("python3", "python3.13")[which]) for which, _, environ in runs)
    assert [target for _, target, _ in plan(("a", "b"), kernels, ["--first", "--demo"])] == ["demo", "test-units"]
