"""Calls of mtrain's Python functions with arguments that they do not have: answered with the caller's line and the known names."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mtrain.errors import ScriptError
from mtrain.spec.suggest import closest

T = TypeVar("T", bound=Callable[..., Any])
PACKAGE = os.path.join(Path(__file__).parents[1], "")
"""Beginning of the path of every file of mtrain."""


class WrongCall(ScriptError, TypeError):
    """A function of mtrain was called with an argument that it does not have, or without one that it needs."""


def explain_calls(target: T) -> T:
    """Return a function or class whose wrong calls raise ``WrongCall``; of a class, also those of its public methods."""
    if not isinstance(target, type):
        return _explain(target, target.__name__)  # type: ignore[return-value]
    for name, member in list(vars(target).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            shown = target.__name__ if name == "__init__" else f"{target.__name__.lower()}.{name}"
            setattr(target, name, _explain(member, shown))
    return target


def _explain(function: Callable[..., Any], shown: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                # Only now, so that a right call costs nothing; a TypeError from within the function passes unchanged.
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise WrongCall(_message(shown, signature, kwargs, problem=str(error))) from None
            raise

    return call


def _message(shown: str, signature: inspect.Signature, kwargs: dict[str, Any], *, problem: str) -> str:
    names = [name for name in signature.parameters if name != "self"]
    unknown = [name for name in kwargs if name not in names]
    known = f"known: {', '.join(names)}" if names else "it takes none"
    if not unknown:
        return f"{_place()}{shown}: {problem}; {known}"
    word = unknown[0]
    near = closest(word, names)
    meant = f"did you mean {near!r}? " if near else ""
    return f"{_place()}{shown}({word}=...): unknown keyword {word!r}; {meant}{known}"


def _place() -> str:
    """Return the file and line of the caller, the first one outside of mtrain; empty: there is none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
