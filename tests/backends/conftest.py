"""Tests here share the small network of the contract tests, on the framework of the session."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.framework import Framework


@pytest.fixture(autouse=True)
def one_thread(framework: Framework) -> None:
    framework.one_thread()


@pytest.fixture
def session(framework: Framework) -> Iterator[Any]:
    """The one rank of `solo` on the framework of these tests."""
    with framework.solo() as session:
        yield session
