"""The mode ``script`` of a rank: it runs a user's own training script, which calls ``mtrain.session``."""

import contextlib
import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from mtrain.core.interfaces import Backend
from mtrain.errors import Interrupted, UsageError
from mtrain.rank.script.job import RUNNING, STARTED, RankJob, Running, digest_of, without_own_frames
from mtrain.spec import collector
from mtrain.spec.files import open_file

IMPORTS_TORCH = re.compile(r"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE)
IMPORTS_MTRAIN = re.compile(r"^[ \t]*(?:import|from)\b.*\bmtrain(?:_tensorflow)?\b", re.MULTILINE)
SETS_VARIABLES = re.compile(r"\b(?:environ|putenv)\b")


def allows_torch_ahead(script: Path) -> bool:
    """Return whether torch may be imported before ``script`` runs: the script imports it, and sets no variables that torch reads."""
    try:
        with open_file(script) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(IMPORTS_TORCH.search(text)) and not SETS_VARIABLES.search(text)


def knows_mtrain(script: Path) -> bool:
    """Return whether ``script`` imports mtrain, so that it may ask whether it is to end. An unreadable one is refused later."""
    try:
        with open_file(script) as file:
            return bool(IMPORTS_MTRAIN.search(file.read().decode("utf-8", errors="replace")))
    except OSError:
        return True


def import_ahead(backend: Backend) -> None:
    """Import the framework and what ``mtrain.session`` needs."""
    # Collections of garbage take a third of the time of these imports, which leave nearly nothing to collect.
    with collector.pause(), contextlib.suppress(Exception):  # the script imports it again, and says what is wrong
        import_module("mtrain.rank.script.session")
        _ = backend.nn, backend.ops
    collector.keep_all()


def _tell_end(job: RankJob, reason: Literal["done", "interrupted", "failed"]) -> None:
    """Tell those who want to know that the script has ended."""
    for call in job.at_end:
        call(reason)


def run_script(job: RankJob, script: Path, arguments: Sequence[str], *, digest: str | None) -> None:
    """Run ``script`` as the main program of this rank.

    Raises:
        UsageError: the script is missing on this host, or differs from the one of the host that started the job.
    """
    host = os.uname().nodename
    try:
        own_digest = digest_of(script)
    except OSError as error:
        raise UsageError(
            f"{script}: cannot be read on {host}: {error.strerror}; every host needs the script"
        ) from error
    if digest is not None and own_digest != digest:
        raise UsageError(
            f"{script}: the script on {host} (sha256 {own_digest[:12]}) is not the one with which the job was started "
            f"(sha256 {digest[:12]}); copy it to every host"
        )
    if job.resolved.backend.framework == "torch" and allows_torch_ahead(script):
        import_ahead(job.resolved.backend)
    job.resolved.backend.before_script()
    before = RUNNING.set(Running(job=job))
    STARTED.append(job)
    # As Python itself does for a main program: its own command line, and its folder first on the path.
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
        _tell_end(job, "done")
    except SystemExit as error:
        # A script may end with sys.exit(0); anything else is a failure of this rank.
        has_failed = error.code not in (None, 0)
        if has_failed:
            job.leave(without_own_frames(error))
        _tell_end(job, "failed" if has_failed else "done")
        if has_failed:
            raise
    except BaseException as error:
        job.leave(without_own_frames(error))  # before the frames of mtrain are added again
        _tell_end(job, "interrupted" if isinstance(error, Interrupted) else "failed")
        raise
    finally:
        STARTED.clear()
        RUNNING.reset(before)
