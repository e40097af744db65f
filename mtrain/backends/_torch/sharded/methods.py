"""Methods of a user's own module whose weights are split: each runs as its forward method does, in which weights are gathered."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import nn

from mtrain.backends._torch import internals


def own_methods(model: nn.Module) -> list[str]:
    """Return the names of the public methods that classes outside of torch have given to a module."""
    classes = [kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    members = {name: member for kind in classes for name, member in vars(kind).items()}
    return [
        name
        for name, member in members.items()
        if inspect.isfunction(member) and not name.startswith("_") and not hasattr(nn.Module, name)
    ]


def gather_in_methods(model: nn.Module, gathered: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the methods of a module run within its hooks on ``forward``; every rank must call them alike.

    ``gathered`` returns a context around each of them. A method that another one or ``forward`` calls is a part of that call.
    """
    names = own_methods(model)
    calls = 0

    def count(change: int) -> None:
        nonlocal calls
        calls += change

    if names:
        model.register_forward_pre_hook(lambda *_: count(1), prepend=True)
        model.register_forward_hook(lambda *_: count(-1), always_call=True)

    def within_hooks(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **words: Any) -> Any:
            if calls:
                return method(*arguments, **words)

            def forward(*arguments: Any, **words: Any) -> Any:
                restore()
                with gathered():
                    return method(*arguments, **words)

            with _replace_forward(model, forward) as restore:
                return model(*arguments, **words)

        return call

    for name in names:
        setattr(model, name, within_hooks(getattr(model, name)))


@contextmanager
def _replace_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Replace ``model.forward``; yield a function that puts it back, as the method may call the model itself."""
    own: dict[str, Any] = {
        name: model.__dict__[name] for name in ("forward", internals.COMPILED_CALL) if name in model.__dict__
    }

    def restore() -> None:
        model.__dict__.pop("forward", None)
        model.__dict__.update(own)

    model.__dict__[internals.COMPILED_CALL] = None
    model.__dict__["forward"] = forward
    try:
        yield restore
    finally:
        restore()
