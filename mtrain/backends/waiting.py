"""Measure how long a rank waits for the others. Comparisons and jobs with metrics measure it."""

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any


class Waits:
    """A counter of the seconds in which this rank did nothing but wait for other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._began = 0.0
        self._watched: list[tuple[Any, str, Any]] = []

    def begin(self, *ignored: object) -> None:
        """Start counting until the matching ``end``; may be nested.

        Arguments are ignored, so that it can serve as a hook.
        """
        if not self._depth:
            self._began = perf_counter()
        self._depth += 1

    def end(self, *ignored: object) -> None:
        """End what the matching ``begin`` started; arguments are ignored too."""
        self._depth -= 1
        if not self._depth:
            self.seconds += perf_counter() - self._began

    def watch(self, owner: Any, *names: str) -> None:
        """Count the time inside these methods of ``owner``, an object or a class; replaces them until ``release``."""
        for name in names:
            original = getattr(owner, name)
            self._watched.append((owner, name, original))
            setattr(owner, name, self._count(original))

    def release(self) -> None:
        """Restore the methods that ``watch`` replaced."""
        while self._watched:
            owner, name, original = self._watched.pop()
            setattr(owner, name, original)

    def _count(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def call_and_count(*args: Any, **named: Any) -> Any:
            self.begin()
            try:
                return call(*args, **named)
            finally:
                self.end()

        return call_and_count
