"""Write ``report.html``: everything about one run in a file that needs nothing else."""

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from mtrain import __version__
from mtrain.core.record_files import METRICS
from mtrain.errors import UsageError
from mtrain.spec import outputs, remedies
from mtrain_ui.pages.content import collect, photographs
from mtrain_ui.pages.disclosed import disclosed
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.timeline import Follower

NAME = "report.html"
TEMPLATES = "jinja2"
log = logging.getLogger(__name__)


def page(run: RunFiles) -> str:
    """Return the report of a run, also of one that goes on. It is for anybody, so it names no host and no path."""
    from mtrain_ui.pages import charts
    from mtrain_ui.pages.rendering import rendered, style

    timeline = Follower(run).refresh()
    content = disclosed(collect(run, timeline), run)
    return rendered(
        "report.html",
        name=run.path.resolve().name,
        style=style(),
        content=content,
        has_records=bool(timeline.updates or timeline.evaluations),
        curves=charts.run_charts(timeline, groups=content.groups),
        detail_charts=charts.detail_charts(content.details),
        grids=charts.grids(content.details),
        photographs=photographs(run),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the run in ``folder``; return its path.

    ``out``: the file to write; None: ``report.html`` in the run folder.

    Raises:
        UsageError: the folder is none of a run, the file cannot be written, or a package is missing.
    """
    if find_spec(TEMPLATES) is None:
        raise UsageError(
            f"a report needs {TEMPLATES}, which is not installed; install it with: {remedies.install('report')}"
        )
    if not (folder / METRICS).is_file():
        what = f"has no {METRICS}" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
        raise UsageError(f"{folder}: {what}; give the folder of a run, such as runs/digits")
    path = folder / NAME if out is None else out
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; give the name of a file, such as {path / NAME}")
    text = page(RunFiles(folder))
    try:
        outputs.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path}: the report cannot be written: {error.strerror or error}") from error
    return path


def write_after(folder: Path | None, *, code: int, warn: Callable[[str], object]) -> Path | None:
    """Write the report of a job that has ended; return its path, None where there is none.

    An error becomes one warning, because the job itself is done.

    Args:
        folder: The run folder; None where another host has it.
        code: Exit code of the job. A job that was asked to end gets no report: who asked may give it seconds.
        warn: Receives the warning.
    """
    if folder is None or code not in (0, 1) or not (folder / METRICS).is_file():
        return None
    if find_spec(TEMPLATES) is None:  # The preflight has said so.
        return None
    try:
        return write(folder)
    except Exception as error:
        log.debug("%s could not be written", NAME, exc_info=True)
        warn(f"warning: {folder / NAME} could not be written: {error}")
        return None
