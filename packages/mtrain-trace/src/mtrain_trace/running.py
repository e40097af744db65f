"""Start a command with the recorder in its Python processes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mtrain_trace.reading import TraceError
from mtrain_trace.recorder import AT_VARIABLE, EVERY_VARIABLE, NUDGE_VARIABLE, UPDATES_VARIABLE
from mtrain_trace.startup import VARIABLE

PROBE_BYTES = 64 << 10
"""Room that the disk of a trace must have; an update takes a few kilobytes."""


@dataclass(frozen=True)
class RecordingSettings:
    """What is recorded of a command."""

    every: int = 1
    at: tuple[int, ...] = ()
    calibrate: bool = False
    updates: int | None = None
    """Updates after which each process of the training is ended; None: it ends by itself."""

    def variables(self, out: Path) -> dict[str, str]:
        """Return the variables by which the processes of a command know what to record."""
        found = {
            VARIABLE: str(out.resolve()),
            EVERY_VARIABLE: str(self.every),
            AT_VARIABLE: ",".join(map(str, self.at)),
        }
        if self.calibrate:
            found[NUDGE_VARIABLE] = "1"
        if self.updates is not None:
            found[UPDATES_VARIABLE] = str(self.updates)
        return found


def run(
    command: Sequence[str],
    out: Path,
    settings: RecordingSettings,
    *,
    variables: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> int:
    """Run a command and return its exit code; the processes in it that train leave their traces in ``out``.

    Args:
        command: the words of the command.
        out: folder of the trace.
        settings: what is recorded.
        variables: variables of the environment to set besides.
        log: file for what the command prints; None: it prints to the terminal.

    Raises:
        TraceError: the folder holds something, or the command cannot be started.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TraceError(f"{out}: is not empty; a trace gets a folder of its own")
    environment = {**os.environ, **(variables or {})}
    if problem := refusal_of_disk(out):
        raise TraceError(problem)
    boot = str(Path(__file__).resolve().parent / "boot")
    # Every Python process of the command begins with `boot/sitecustomize.py`, however it is started.
    environment["PYTHONPATH"] = os.pathsep.join([boot, *filter(None, [environment.get("PYTHONPATH")])])
    environment.update(settings.variables(out))
    try:
        done = subprocess.run(command, env=environment, check=False, stdout=log, stderr=log and subprocess.STDOUT)  # noqa: S603  (the user's own command)
    except OSError as error:
        raise TraceError(f"{command[0]}: cannot be started: {error.strerror}") from error
    return done.returncode


def refusal_of_disk(out: Path) -> str:
    """Return why no trace can be written into a folder, which need not exist yet; "" where one can."""
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{out}: cannot be written: {error.strerror}; make room, or give another --out"
    return ""
