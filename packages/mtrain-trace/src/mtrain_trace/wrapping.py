"""Put calls of a recorder around the functions of a framework; what fails in them never ends the training."""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

_failures: list[str] = []


def attempt(note: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``note``; a failure is printed once, and never ends the training that is being recorded."""
    try:
        return note(*arguments)
    except Exception as error:
        # Whatever fails, fails again at every update: one line says that the trace will be incomplete.
        if not _failures:
            print(f"mtrain-trace: cannot record this training: {type(error).__name__}: {error}", file=sys.stderr)
        _failures.append(str(error))
        return None


def wrap(
    attempt: Callable[..., Any],
    owner: Any,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    is_training: Callable[[], bool] = lambda: True,
) -> None:
    """Replace a function by one that also calls ``before(arguments, keywords)`` or ``after(arguments, keywords, result)``.

    Args:
        attempt: calls these two, as the function of this name does.
        owner: class or module of the function.
        name: name of the function.
        before: called first, while ``is_training`` says so: an evaluation shows nothing of the training.
        after: called last.
        is_training: whether gradients are computed.
    """
    original = getattr(owner, name)

    # Scripts and libraries look at names and signatures of what they call.
    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if before is not None and is_training():
            attempt(before, arguments, keywords)
        result = original(*arguments, **keywords)
        if after is not None:
            attempt(after, arguments, keywords, result)
        return result

    setattr(owner, name, wrapper)


def argument(arguments: Any, keywords: Any, place: int, *names: str, default: Any = None) -> Any:
    """Return the argument of a call that stands at a place, or was given by one of its names."""
    named = [keywords[name] for name in names if name in keywords]
    return named[0] if named else arguments[place] if len(arguments) > place else default
