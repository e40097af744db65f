"""Connect the recorder to torch as soon as a process has imported it; a process that never does pays nothing.

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
from typing import Any

VARIABLE = "MTRAIN_TRACE"
"""Variable that names the folder of the trace and switches recording on."""


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as usual, and connects the recorder when its own import is complete."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._spec: importlib.machinery.ModuleSpec | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of torch whose loader is this object; None for all other modules."""
        if name != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        self._spec = importlib.util.find_spec("torch")
        if self._spec is None or self._spec.loader is None:
            return self._spec
        spec = importlib.util.spec_from_loader("torch", self, origin=self._spec.origin)
        if spec is not None:
            spec.submodule_search_locations = self._spec.submodule_search_locations
            spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Leave the creation of the module to torch's own loader."""
        loader: Any = self._spec.loader if self._spec else None
        return loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import torch, and connect the recorder to it."""
        loader: Any = self._spec.loader if self._spec else None
        module.__spec__ = self._spec
        module.__loader__ = loader
        loader.exec_module(module)
        try:
            from mtrain_trace import torch_hooks
            from mtrain_trace.recorder import Recorder

            torch_hooks.install(Recorder(self._out))
        except Exception as error:  # the training goes on, whatever is missing for its trace
            print(f"mtrain-trace: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)


def connect() -> None:
    """Wait for the import of torch in this process, if a trace is asked for; done once."""
    if os.environ.get(VARIABLE) and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(os.environ[VARIABLE]))
