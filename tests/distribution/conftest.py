"""What is published, built once for the tests of it."""

from pathlib import Path

import pytest

from tests.distribution.building import Built, build_all, copy_checkout
from tests.starts import starts_processes


@pytest.fixture(scope="package")
@starts_processes
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files without its caches and former builds."""
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="package")
@starts_processes
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Source distribution and wheel of mtrain and of each package, by the name of its module."""
    return build_all(copy, tmp_path_factory.mktemp("built"))
