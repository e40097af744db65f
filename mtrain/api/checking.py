"""Checks of this host, the hosts of a job and every installed backend, before a job is started."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import mtrain
from mtrain.jobs.doctor import Checkup, DoctorRequest, examine
from mtrain.jobs.preflight.findings import Finding, show

__all__ = ["Checkup", "DoctorRequest", "build_horovod", "check"]


def check(request: DoctorRequest, *, stream: IO[str] | None = None) -> Checkup:
    """Run all checks; ``stream`` receives the findings in words as soon as they are known, None: nothing is shown.

    Raises:
        UsageError: the spec is wrong, or the hosts cannot be reached at all.
    """

    def report(findings: Sequence[Finding], hosts: str) -> None:
        if stream is not None:
            show(findings, every=hosts, stream=stream)

    return examine(request, report=report)


def build_horovod(python: str | None = None, frameworks: str | None = None) -> int:
    """Run the build script of mtrain; return the script's exit code.

    Args:
        python: the interpreter for which Horovod is built; None: the one that runs mtrain.
        frameworks: ``torch``, ``tensorflow``, or both with a comma; None: the script chooses.
    """
    script = Path(mtrain.__file__).parent / "backends" / "_horovod" / "build.sh"
    words = [python or sys.executable, *([] if frameworks is None else [frameworks])]
    return subprocess.run(["bash", str(script), *words], check=False).returncode  # noqa: S603, S607 - ours
