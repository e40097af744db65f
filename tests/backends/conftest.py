"""Tests here share the small network of the contract tests, on the framework of the session."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.framework import Framework


@pytest.fixture(autouse=True)
def one_thread(framework: Framework) -> None:
    framework.one_thread()


@pytest.fixture
def backend(framework: Framework) -> Iterator[Any]:
    """`solo` on the session's framework, entered."""
    with framework.solo() as entered:
        yield entered
