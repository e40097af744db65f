"""A skip in continuous integration is a failure unless it is on the list."""

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


@pytest.mark.parametrize(
    ("body", "ci", "flags", "code"),
    [
        (TESTS, "true", [], 0),
        (TESTS + UNLISTED, "true", [], 1),
        (TESTS + UNLISTED, "", ["--no-skips"], 1),
        (TESTS + UNLISTED, "", [], 0),
        (TESTS + NO_PROGRAM, "", ["--no-skips"], 0),
        (TESTS + NO_PROGRAM, "true", ["--no-skips"], 1),
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


def test_every_reason_on_the_list_is_one_that_a_test_gives() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py") if file.name != "test_skips.py")
    given = set(re.findall(r'(?:skip\(|reason=|return )f?"([^"]+)"', sources))
    for entry in tomllib.loads(LIST.read_text())["skip"]:
        assert any(re.search(entry["reason"], text) for text in given), (
            f"{entry['reason']}: no test skips for this reason"
        )
