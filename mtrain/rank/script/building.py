"""Build the model of a script once on each rank."""

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from mtrain.data.objects import is_module
from mtrain.errors import ScriptError


class Building:
    """A function that builds the script's model, and the module that it has built."""

    def __init__(self, build: Callable[[], Any]) -> None:
        """Check that ``build`` is a function.

        Raises:
            ScriptError: it is a finished module, or cannot be called.
        """
        if not callable(build) or is_module(build):
            raise ScriptError(
                f"session.prepare: the model is a {type(build).__name__}; give a function that builds it, such as "
                "lambda: MyNet(), so that every rank starts from the same random numbers"
            )
        self._build = build
        self.module: Any = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the parameters and buffers by name, before a backend splits them."""

    def __call__(self) -> Any:
        """Build the module.

        Raises:
            ScriptError: the function has returned something else.
        """
        module = _with_keras(self._build)
        if not is_module(module):
            raise ScriptError(
                f"session.prepare: `build` returned a {type(module).__name__}; expected a module of the backend's framework"
            )
        self.module = module
        with suppress(RuntimeError):  # lazy layers have no shapes yet; the backend refuses them by name
            entries = [*module.named_parameters(), *module.named_buffers()]
            self.shapes = {name: tuple(x.shape) for name, x in entries}
        return module


def _with_keras(build: Callable[[], Any]) -> Any:
    """Build; a model of Keras 3 with its torch backend becomes a module that every backend can split."""
    if "keras" in sys.modules and "torch" in sys.modules:
        _keras_modules().seed()
    module = build()
    # The function may have been the first to import Keras.
    return _keras_modules().adapt(module) if "keras" in sys.modules and "torch" in sys.modules else module


def _keras_modules() -> Any:
    return import_module("mtrain.backends._torch.keras_modules")
