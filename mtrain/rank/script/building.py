"""Build the model of a script once on each rank."""

from collections.abc import Callable
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
        module = self._build()
        if not is_module(module):
            raise ScriptError(
                f"session.prepare: `build` returned a {type(module).__name__}; expected a module of the backend's framework"
            )
        self.module = module
        entries = [*module.named_parameters(), *module.named_buffers()]
        self.shapes = {name: tuple(x.shape) for name, x in entries}
        return module
