"""Checks of the internals of foreign libraries: a failure names what is missing, and the version of the library."""

import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any


class Library:
    """One foreign library, at the installed version."""

    def __init__(self, distribution: str, internals: ModuleType) -> None:
        self.name = f"{distribution} {version(distribution)}"
        self._internals = internals

    def wrong(self, what: str) -> str:
        """Return the message for something that is not as mtrain uses it."""
        tested = ", ".join(self._internals.TESTED)
        return f"{self.name}: {what}; mtrain was tested with {tested}: adapt {self._internals.__name__} to this version"

    def get(self, path: str) -> Any:
        """Return the object at ``module:attribute.attribute``; an assertion names what does not exist."""
        module_name, _, attributes = path.partition(":")
        try:
            found = importlib.import_module(module_name)
        except ImportError as error:
            raise AssertionError(self.wrong(f"{module_name} cannot be imported ({error})")) from error
        for attribute in filter(None, attributes.split(".")):
            assert hasattr(found, attribute), self.wrong(f"{path} does not exist")
            found = getattr(found, attribute)
        return found

    def takes(self, path: str, expected: Sequence[str]) -> None:
        """Assert that the Python function at ``path`` has parameters of these names, the first ones in this order."""
        names = list(inspect.signature(self.get(path)).parameters)
        assert names[: len(expected)] == list(expected), self.wrong(
            f"{path} takes ({', '.join(names)}), not {expected}"
        )

    def has(self, value: object, names: Sequence[str]) -> None:
        """Assert that ``value`` has all attributes of these names."""
        missing = [name for name in names if not hasattr(value, name)]
        assert not missing, self.wrong(f"a {type(value).__name__} has no {', '.join(missing)}")

    def reads(self, path: str, words: Sequence[str]) -> None:
        """Assert that the source of the Python object at ``path`` contains all of ``words``."""
        source = inspect.getsource(self.get(path))
        missing = [word for word in words if word not in source]
        assert not missing, self.wrong(f"{path} no longer contains {', '.join(missing)}")

    def same(self, what: str, actual: Any, expected: Any) -> None:
        """Assert that something that was computed with an internal function is as expected."""
        assert actual == expected, self.wrong(f"{what} gives {actual}, expected {expected}")
