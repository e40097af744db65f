"""Flags that set values of a spec: declared once, with the path that they set."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]
Typed = dict[str, tuple[Any, str]]
"""Values of a spec by dotted path, each with the flag as it was typed."""


class SpecOption(click.Option):
    """A flag whose value becomes one or several values of the spec."""

    def __init__(
        self, names: Sequence[str], *, sets: str | Callable[[Any], Mapping[str, Any]], **settings: Any
    ) -> None:
        super().__init__(names, **settings)
        self._sets = sets

    def values_for(self, value: Any) -> Typed:
        """Return the values of the spec for a value of the flag."""
        values = {self._sets: value} if isinstance(self._sets, str) else self._sets(value)
        # As a person would type it: `true`, and the words of a list one after the other.
        text = str(value).lower() if isinstance(value, bool) else value
        words = [shlex.quote(str(each)) for each in (text if isinstance(text, tuple) else (text,))]
        shown = longest(self.opts) if self.is_flag else " ".join((longest(self.opts), *words))
        return {path: (each, shown) for path, each in values.items()}


def spec_option(sets: str | Callable[[Any], Mapping[str, Any]], *names: str, **settings: Any) -> Option:
    """Return a flag that sets values of the spec.

    Args:
        sets: the path of the spec that takes the value as it is, or a function that returns the values by path.
        names: names of the flag; the first long one is named in messages.
        settings: as ``click.option`` takes them.
    """
    return click.option(*names, cls=SpecOption, sets=sets, **settings)


def switch(values: Mapping[str, Any], name: str, **settings: Any) -> Option:
    """Return a flag without a value, which sets ``values`` of the spec."""
    return spec_option(lambda on: values if on else {}, name, is_flag=True, **settings)


def adds(*options: Option) -> Callable[[F], F]:
    """Return a decorator that adds flags to a command, in this order of the help."""

    def add(command: F) -> F:
        # Decorators apply from the innermost on, and click shows the outermost first.
        for option in reversed(options):
            command = option(command)
        return command

    return add


def parameters_of(options: Sequence[Option]) -> list[click.Option]:
    """Return the parameters that flags define."""

    # click keeps the parameters of a command on the function that it will call.
    def nothing() -> None: ...

    adds(*options)(nothing)
    return list(reversed(getattr(nothing, "__click_params__", [])))


def longest(names: Sequence[str]) -> str:
    """Return the name of a flag for messages: its first one that begins with ``--``."""
    return next((name for name in names if name.startswith("--")), names[0])
