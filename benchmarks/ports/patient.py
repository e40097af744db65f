"""Run a script as the main program, and end a moment after it: ``torchrun patient.py SCRIPT ARGUMENTS``.

A thread of gloo may wait for the interpreter after an exchange. If Python ends first, the thread aborts the process, and torchrun
reports a finished script as failed.
"""

import runpy
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    time.sleep(0.1)
