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


@pytest.mark.parametrize(
    ("body", "ci", "code"),
    [(TESTS, "true", 0), (TESTS + UNLISTED, "true", 1)],
    ids=["listed", "not listed"],
)
def test_an_unlisted_skip_fails_the_run_where_ci_is_set(tmp_path: Path, body: str, ci: str, code: int) -> None:
    (tmp_path / "test_some.py").write_text(body)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CI": ci}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-p", "no:cacheprovider", "test_some.py"]
    process = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stdout + process.stderr
    assert ("test_some.py::test_not_listed: no such data here" in process.stdout) == (code == 1)


def test_every_reason_on_the_list_is_one_that_a_test_gives() -> None:
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for entry in tomllib.loads(LIST.read_text())["skip"]:
        text = re.sub(r"\\(.)", r"\1", entry["reason"].strip("^$"))
        assert text in sources, f"{entry['reason']}: no test skips for this reason"
