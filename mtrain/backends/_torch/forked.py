"""Ranks as copies of one process that has imported torch and the program of a rank, so that a host imports them once.

Only on Linux and where no GPU is visible: what a library keeps for a GPU's driver does not survive a fork.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

from mtrain.spec import collector
from mtrain.system import copied
from mtrain.system.copied import PASSED_ON, CopiedProcess
from mtrain.system.ending import end_with
from mtrain.system.placement import count_devices

NEEDED = (
    *("torch", "torch.distributed.nn.functional"),
    *("mtrain.backends._torch.nn", "mtrain.backends._torch.ddp_engine", "mtrain.backends._torch.ranks.group"),
)
"""Modules that most ranks import."""


def program(name: str, words: Sequence[str]) -> ModuleType | None:
    """Import torch and module ``name`` for ranks that are copies of this process and have arguments ``words``.

    Returns:
        The module; None if ranks must be processes of their own, which then also report what cannot be imported, or
        because the module says so by ``OWN_PROCESSES`` or its function ``may_be_copied``.
    """
    if sys.platform != "linux" or count_devices(os.environ) or not copied.can_be_shown():
        return None
    try:
        with collector.pause():
            module = import_module(name)
            if not callable(getattr(module, "main", None)) or getattr(module, "OWN_PROCESSES", False):
                return None
            if not getattr(module, "may_be_copied", lambda words: True)(words):
                return None
            for part in NEEDED:
                import_module(part)
    except Exception:
        return None
    collector.keep_all()  # a collection would also write to every object, and so copy the memory that the ranks share
    return module


def start(module: ModuleType, words: Sequence[str], variables: Mapping[str, str]) -> CopiedProcess:
    """Start ``module.main(words)`` in a copy of this process, which ends with what it returns.

    The copy has ``variables`` in its environment, and otherwise what a new process has: signals act as by default, numpy's
    generator is seeded anew, and output is not buffered.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that came in between would be handled by the copy as if it were the starter.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid == 0:
        for number in PASSED_ON:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        copied.become([sys.executable, "-u", "-m", module.__name__, *words], variables)
        main: Callable[[Sequence[str]], int] = module.main
        end_with(lambda: main(words))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return CopiedProcess(pid)
