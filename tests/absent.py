"""A package of mtrain that a test takes to be absent: nothing of it is listed, and it cannot be imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest

from mtrain.spec import packages, plugins


@contextmanager
def absent(package: str) -> Iterator[None]:
    """Hide a distribution such as ``mtrain-deploy`` within the context."""
    module, listed, installed = package.replace("-", "_"), plugins._providers, metadata.distribution

    def others(search_path: tuple[str, ...]) -> dict[Any, Any]:
        return {point: who for point, who in listed(search_path).items() if packages.module_of(point[2]) != module}

    def distribution(name: str) -> metadata.Distribution:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    def forget() -> None:
        plugins._listed_path.clear()
        plugins._read_shipped.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_providers", others)
        patch.setattr(metadata, "distribution", distribution)
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            patch.setitem(sys.modules, name, None)
        patch.setitem(sys.modules, module, None)
        forget()
        try:
            yield
        finally:
            forget()
