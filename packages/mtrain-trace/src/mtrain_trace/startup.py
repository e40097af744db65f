"""Connect the recorder to a framework as soon as a process has imported it; a process that never does pays nothing.

``connect`` is called at the start of every Python process while ``MTRAIN_TRACE`` names the folder of a trace.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from mtrain_trace.recorder import Recorder

VARIABLE = "MTRAIN_TRACE"
"""Variable that names the folder of the trace and switches recording on."""


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules as usual, and calls a function of each when its own import is complete.

    ``failure``: what a line on standard error says of an exception in such a function; the program goes on.
    """

    def __init__(
        self,
        actions: dict[str, Callable[[ModuleType], None]],
        failure: str = "mtrain-trace: this process is not recorded",
    ) -> None:
        self._actions = actions
        self._failure = failure
        self._specs: dict[str, importlib.machinery.ModuleSpec] = {}
        self._searched: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of an awaited module whose loader is this object; None for all other modules."""
        if name not in self._actions or name in self._searched:
            return None
        self._searched.add(name)  # the search below comes here again
        try:
            found = importlib.util.find_spec(name)
        finally:
            self._searched.remove(name)  # a program may ask whether there is such a module, and import it later
        if found is None or found.loader is None:
            return found
        self._specs[name] = found
        spec = importlib.util.spec_from_loader(name, self, origin=found.origin)
        if spec is not None:
            spec.submodule_search_locations = found.submodule_search_locations
            spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Leave the creation of the module to its own loader."""
        loader: Any = self._specs[spec.name].loader
        return loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module, and call its function."""
        spec = self._specs[module.__name__]
        # Libraries look at these two for the files of a module, and pickle by them.
        module.__spec__ = spec
        module.__loader__ = spec.loader
        loader: Any = spec.loader
        loader.exec_module(module)
        try:
            self._actions[module.__name__](module)
        except Exception as error:  # the training goes on, whatever is missing for its trace
            print(f"{self._failure}: {type(error).__name__}: {error}", file=sys.stderr)


class Connection:
    """Connects one recorder to each framework and stack of this process, now or after its import."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._recorder: Recorder | None = None
        self._listener: Any = None

    @property
    def recorder(self) -> Recorder:
        """Return the recorder of this process, which is made when it is needed."""
        if self._recorder is None:
            from mtrain_trace.recorder import Recorder

            self._recorder = Recorder(self._out)
        return self._recorder

    def actions(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what is done after the import of each module."""
        return {
            "torch": self._torch,
            "torch._dynamo": self._dynamo,
            "deepspeed.runtime.engine": self._hook_deepspeed,
            "tensorflow": self._tensorflow,
            "paddle": self._paddle,
        }

    def begin(self) -> None:
        """Connect to what is imported, and wait for the rest."""
        waiting = self.actions()
        for name in list(waiting):
            if name in sys.modules:
                waiting.pop(name)(sys.modules[name])
        # First, or the usual finders would import the framework before anybody is told.
        sys.meta_path.insert(0, AfterImport(waiting))

    def _torch(self, _: ModuleType) -> None:
        from mtrain_trace import torch_hooks

        self._listener = torch_hooks.install(self.recorder)

    def _dynamo(self, module: ModuleType) -> None:
        from mtrain_trace import torch_hooks

        torch_hooks.keep_from(module)

    def _tensorflow(self, _: ModuleType) -> None:
        from mtrain_trace import tensorflow_hooks

        if "torch" not in sys.modules:  # a script of torch may import TensorFlow for its data or its boards
            tensorflow_hooks.install(self.recorder)

    def _paddle(self, _: ModuleType) -> None:
        from mtrain_trace import paddle_hooks

        paddle_hooks.install(self.recorder)  # a package that imports torch besides does no harm: its optimizers rest

    def _hook_deepspeed(self, module: ModuleType) -> None:
        from mtrain_trace import torch_deepspeed

        if self._listener is not None:
            torch_deepspeed.install(self._listener, module)


def connect() -> None:
    """Wait for the import of a framework in this process, if a trace is asked for; done once."""
    if os.environ.get(VARIABLE) and not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        Connection(os.environ[VARIABLE]).begin()
