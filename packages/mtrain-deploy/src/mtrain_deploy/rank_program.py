"""The program of the one rank that a verb of this package starts: ``python -m MODULE --run-dir FOLDER --resume WEIGHTS``."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mtrain.rank import process
from mtrain.rank.records import log_to_stderr
from mtrain.spec import config
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder, keep_private


class Work(Protocol):
    """What the rank does with the weights, in a folder with the spec and the request."""

    def __call__(self, resolved: Resolved, run_folder: RunFolder, weights: Path, *, leave: process.Leaving) -> None:
        """Do it; ``leave`` records an error before the backend is left, see ``process.Leaving``."""


def run(work: Work, argv: Sequence[str] | None = None) -> int:
    """Run the rank with the arguments that a plan wrote; return the exit code."""
    parser = argparse.ArgumentParser(description="one rank of a job; started by `mtrain export` and `mtrain prune`")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", type=Path, required=True)
    arguments = parser.parse_args(argv)
    keep_private()
    run_folder = RunFolder(arguments.run_dir)
    resolved = Resolved.of(config.read(run_folder.spec_to_read))

    def act(_stop: process.StopRequest, leave: process.Leaving) -> None:
        log_to_stderr()
        work(resolved, run_folder, arguments.resume, leave=leave)

    return process.run(act, run_folder=run_folder, environ=os.environ)
