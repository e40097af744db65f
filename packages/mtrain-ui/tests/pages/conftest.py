"""A server of pages over folders of the test's making, and a browser."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import browser
from tests.starts import starts_processes

__all__ = ["browser"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """An empty folder of runs, inside another folder."""
    folder = tmp_path_factory.mktemp("ui") / "runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
@starts_processes
def address(runs) -> Iterator[str]:
    """The address, without a slash at its end, of `mtrain ui` over the folder."""
    pytest.importorskip("starlette", reason="the extra ui is not installed")
    pytest.importorskip("uvicorn", reason="the extra ui is not installed")
    command = [sys.executable, "-m", "mtrain", "ui", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/", line)
        try:
            assert found, line + process.stderr.read()
            yield found.group(1)
        finally:
            process.terminate()
            errors = process.communicate(timeout=20)[1]
    assert "Traceback" not in errors, errors
