"""Tests that need Horovod's library, which is compiled: they are marked, so that they can be run last, after its build.

A plugin of pytest, loaded by `conftest.py`. A test that starts processes (`job`) and has the word in its name or its source
gets the marker `horovod`; one that imports the library itself has it in its source. Where there is no Horovod they are skipped,
which `skips.toml` allows only for want of a compiler.
"""

import inspect
import linecache
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = ("cmake", "g++", "make")


def find_missing() -> list[str]:
    """Return Debian's packages that are missing here and without which Horovod cannot be built."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    return missing if has_headers else [*missing, "python3-dev"]


def reason() -> str | None:
    """Say why tests of Horovod are skipped; None: they are not."""
    if find_spec("horovod") is not None:
        return None
    if missing := " ".join(find_missing()):
        return f"no compiler for Horovod; Debian: apt-get install {missing}"
    return "Horovod is not built; run: make horovod"


def mentions_horovod(item: pytest.Item) -> bool:
    """Whether the name of a test says so, its parameters included, or its body: decorators name the other cases too."""
    function = getattr(item, "function", None)
    return "horovod" in item.nodeid.lower() or (function is not None and _body_mentions(function))


@cache
def _body_mentions(function: Callable[..., object]) -> bool:
    file = inspect.getsourcefile(function)
    # To find where a function ends, Python reads it word by word.
    is_in_file = file is None or "horovod" in "".join(linecache.getlines(file)).lower()
    return is_in_file and "horovod" in inspect.getsource(function).partition("def ")[2].lower()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "horovod: needs Horovod's library; run after its build")


# Not first, but before pytest selects by marks: fixtures have made their tests jobs.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("job") and mentions_horovod(item):
            item.add_marker("horovod")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and (why := reason()) is not None:
        pytest.skip(why)  # raised here, for all of them: pytest sums them up in one line
