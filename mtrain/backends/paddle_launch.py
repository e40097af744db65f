"""Run Paddle's launcher without importing Paddle, which would take most of the time until the ranks run.

``python -m mtrain.backends.paddle_launch`` takes the arguments of ``python -m paddle.distributed.launch``. That launcher asks
Paddle which accelerators there are, and nothing else. On a host without any, modules that say so stand in for Paddle.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mtrain.system.placement import count_devices

FOLDERS = {"paddle": ".", "paddle.distributed": "distributed"}
"""Packages that hold the launcher, with their folders. Their own code is not run."""
ASKED = ("paddle.base", "paddle.base.core", "paddle.device", "paddle.utils")
"""Modules that the launcher imports."""


class StandIn(ModuleType):
    """A module whose functions answer 0: compiled for no accelerator, and none is there."""

    def __getattr__(self, name: str) -> Any:
        """Return such a function."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: 0


def strtobool(text: str) -> bool:
    """Read a switch of the launcher as ``paddle.utils.strtobool`` does."""
    return text.lower() in ("y", "yes", "t", "true", "on", "1")


def stand_in(root: str) -> None:
    """Put stand-ins in the place of Paddle, which is installed in the folder ``root``."""
    for name in (*FOLDERS, *ASKED):
        sys.modules[name] = module = StandIn(name)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    for name, folder in FOLDERS.items():
        sys.modules[name].__path__ = [os.path.join(root, folder)]
    vars(sys.modules["paddle.utils"])["strtobool"] = strtobool


def main() -> None:
    """Run the launcher with the arguments of this process."""
    spec = find_spec("paddle")
    if spec is not None and spec.origin is not None and not count_devices(os.environ):
        stand_in(os.path.dirname(spec.origin))
        try:
            import_module("paddle.distributed.launch.main")
        except (ImportError, AttributeError):  # another version of it needs more of Paddle
            for name in [each for each in sys.modules if each.split(".")[0] == "paddle"]:
                del sys.modules[name]
    import_module("paddle.distributed.launch.main").launch()


if __name__ == "__main__":
    main()
