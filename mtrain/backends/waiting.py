"""How long a rank waits for the others. Counted where a comparison asks for it; elsewhere nothing of this is called."""

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any


class Waits:
    """Seconds in which this rank has done nothing but wait for other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._began = 0.0
        self._watched: list[tuple[Any, str, Any]] = []

    def begin(self, *ignored: object) -> None:
        """What follows counts, up to ``end``. May be nested; is a hook for what hands over anything."""
        if not self._depth:
            self._began = perf_counter()
        self._depth += 1

    def end(self, *ignored: object) -> None:
        """See ``begin``."""
        self._depth -= 1
        if not self._depth:
            self.seconds += perf_counter() - self._began

    def watch(self, owner: Any, *names: str) -> None:
        """From now on the time inside these methods of ``owner``, an object or a class, counts."""
        for name in names:
            original = getattr(owner, name)
            self._watched.append((owner, name, original))
            setattr(owner, name, self._counted(original))

    def release(self) -> None:
        """What ``watch`` has changed is as before."""
        while self._watched:
            owner, name, original = self._watched.pop()
            setattr(owner, name, original)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*args: Any, **named: Any) -> Any:
            self.begin()
            try:
                return call(*args, **named)
            finally:
                self.end()

        return counted
