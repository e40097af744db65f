"""Names of a package that are imported when they are first used, so that importing the package takes no time."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attributes(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: its name.
        homes: module below it -> the names that it defines.
    """

    def get(name: str) -> Any:
        home = next((module for module, names in homes.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from mtrain.spec import collector

        with collector.pause():
            return getattr(import_module(f"{package}.{home}"), name)

    return get
