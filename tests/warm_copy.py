"""In a warm process: has ``mtrain`` begin in the folder, and with the output, of the test that starts it (`tests.warm`)."""

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import mtrain.__main__ as program
from mtrain.system import warm

SETTING = "MTRAIN_TEST_COPY"
_command = program.main


class OneFramework:
    """Lets no copy of a process that holds torch import Paddle: a process never holds both."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find Paddle, for those who ask whether it is there, with a loader that refuses."""
        found = PathFinder.find_spec(name, path) if name == "paddle" else None
        if found is not None:
            found.loader = self  # type: ignore[assignment]
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Refuse."""
        raise ImportError(
            f"{spec.name} in a copy of a process that holds torch: this test has to start its commands cold"
        )

    def exec_module(self, module: ModuleType) -> None:
        """Never get here."""


def main(words: Sequence[str]) -> int:
    """Run ``mtrain`` with ``words`` as the process that the test has asked for."""
    setting = json.loads(os.environ.pop(SETTING))
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(setting["output"], name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Nothing has read these yet: ranks that have them may be copies as well.
    os.environ.update(setting["variables"])
    warm.OWN_VARIABLES = (*warm.OWN_VARIABLES, *setting["variables"])
    os.chdir(setting["cwd"])
    sys.path[0] = setting["cwd"]
    return _command(list(words))


program.main = main
sys.meta_path.insert(0, OneFramework())  # type: ignore[arg-type]
