"""A skip in continuous integration is a failure unless it is on the list."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.skips import LIST

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_runs(): pass
@pytest.mark.skip(reason="this machine has a GPU")
def test_listed(): pass
@pytest.mark.xfail(reason="known", strict=True)
def test_fails_as_expected(): assert False
"""
UNLISTED = """
def test_not_listed(): pytest.skip("no such data here")
"""
NO_PROGRAM = """
def test_needs_a_program(): pytest.skip("valgrind is not installed")
"""


@pytest.mark.job
@pytest.mark.parametrize(
    ("body", "ci", "flags", "code"),
    [
        (TESTS, "true", [], 0),
        (TESTS + UNLISTED, "true", [], 1),
        (TESTS + UNLISTED, "", ["--no-skips"], 1),
        (TESTS + UNLISTED, "", [], 0),
        (TESTS + NO_PROGRAM, "", ["--no-skips"], 0),
        (TESTS + NO_PROGRAM, "true", ["--no-skips"], 1),
        (TESTS + NO_PROGRAM, "", ["--no-skips", "-n", "2"], 0),
    ],
)
def test_a_skip_fails_the_run_unless_it_is_a_fact_of_the_machine(
    tmp_path: Path, body: str, ci: str, flags: list[str], code: int
) -> None:
    (tmp_path / "test_some.py").write_text(body)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CI": ci}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-p", "no:cacheprovider", *flags, "test_some.py"]
    process = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stdout + process.stderr
    assert ("skips that are not allowed here" in process.stdout) == (code == 1)
    assert ("test_some.py::test_not_listed: no such data here" in process.stdout) == (
        code == 1 and body == TESTS + UNLISTED
    )
    left_out = "test_some.py::test_needs_a_program: valgrind\n" in process.stdout
    assert left_out == (code == 0 and body == TESTS + NO_PROGRAM)


def needed() -> list[str]:
    """The packages of Debian that `make test-others` asks for."""
    (names,) = re.findall(r"^\t@scripts/debian-packages (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return names.split()


@pytest.mark.smoke
def test_every_package_that_make_test_installs_is_one_that_the_list_names() -> None:
    entries = tomllib.loads(LIST.read_text())["skip"]
    assert {name for entry in entries for name in entry.get("packages", ())} == set(needed())
    assert not [entry for entry in entries if "packages" in entry and entry.get("in_ci", True)], "CI has them all"


@pytest.mark.job
def test_without_apt_each_missing_package_is_named_with_its_purpose_and_none_is_installed(tmp_path: Path) -> None:
    for name, script in (("dpkg-query", "exit 1"), ("apt-get", f"touch {tmp_path}/installed")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [ROOT / "scripts" / "debian-packages", *needed()]
    process = subprocess.run(command, env={**environ, "NO_APT": "1"}, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == needed()
    assert all(len(line.split()) > 3 for line in lines[1:-1]), "each says what for"
    assert lines[-1].startswith("NO_APT=1: none is installed")
    assert not (tmp_path / "installed").exists()
    subprocess.run(command, env={**environ, "NO_APT": ""}, capture_output=True, check=True)
    assert (tmp_path / "installed").exists() == (os.getuid() == 0)


def files_of_tests(pattern: str) -> list[Path]:
    return [file for folder in (ROOT / "tests", *ROOT.glob("packages/*/tests")) for file in folder.rglob(pattern)]


def test_every_reason_on_the_list_is_one_that_a_test_gives() -> None:
    sources = "\n".join(file.read_text() for file in files_of_tests("*.py") if file.name != "test_skips.py")
    given = set(re.findall(r'(?:skip\(|reason=|return )f?"([^"]+)"', sources))
    for entry in tomllib.loads(LIST.read_text())["skip"]:
        assert any(re.search(entry["reason"], text) for text in given), (
            f"{entry['reason']}: no test skips for this reason"
        )


def skipped_as_a_whole(file: Path) -> list[str]:
    """The packages for want of which a file of tests skips itself while it is collected."""
    statements = [
        node for node in ast.parse(file.read_text()).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    calls = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [
        str(ast.literal_eval(call.args[0])).partition(".")[0]
        for call in calls
        if ast.unparse(call.func) == "pytest.importorskip"
    ]


def test_no_file_skips_itself_for_want_of_a_library_that_is_built_after_the_tests_were_collected() -> None:
    """`make check` collects all tests before Horovod is built; TensorFlow is in an environment of its own."""
    files = {
        file: skipped_as_a_whole(file) for file in files_of_tests("test_*.py") if "importorskip" in file.read_text()
    }
    assert sum(map(len, files.values())) > 20, "no skips were found: the way of looking for them is wrong"
    early = {
        str(file.relative_to(ROOT)): names for file, names in files.items() if {"horovod", "tensorflow"} & {*names}
    }
    assert not early, "use pytest.mark.skipif(find_spec(...) is None, ...)"
