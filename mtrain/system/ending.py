"""How the process of a rank ends once its work is done."""

import atexit
import ctypes
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run the program of a rank, and end this process with the status that it returns.

    After status 0 the functions run that the program has registered with ``atexit``, and then the process is gone.
    """
    # No library is taken apart: threads of gloo and of other native libraries may still run then, and what they use would be
    # freed under them. Now and then one of them crashed, and a job that had finished counted as failed.
    finished: list[int] = []

    def leave() -> None:
        if finished:
            logging.shutdown()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # what native code has printed and C has not written yet
            os._exit(0)

    # Functions registered later run earlier, so this one is the last of the program's.
    atexit.register(leave)
    status = program()
    if status == 0:
        finished.append(status)
    sys.exit(status)
