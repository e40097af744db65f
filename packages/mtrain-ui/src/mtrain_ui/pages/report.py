"""Write ``report.html``: everything about one run in a file that needs nothing else."""

import time
from importlib.util import find_spec
from pathlib import Path

from mtrain import __version__
from mtrain.core.interfaces.reporter import Reporter
from mtrain.core.record_files import METRICS
from mtrain.errors import UsageError
from mtrain.spec import outputs, remedies
from mtrain_ui.pages.content import collect, photographs
from mtrain_ui.pages.disclosed import disclose
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.timeline import Follower

NAME = "report.html"
TEMPLATES = "jinja2"


def page(run: RunFiles) -> str:
    """Return the report of a run, also of one that goes on. It is for anybody, so it names no host and no path."""
    from mtrain_ui.pages import charts
    from mtrain_ui.pages.rendering import render, style

    timeline = Follower(run).refresh()
    content = disclose(collect(run, timeline), run)
    return render(
        "report.html",
        name=run.path.resolve().name,
        style=style(),
        content=content,
        has_records=bool(timeline.updates or timeline.evaluations),
        curves=charts.run_charts(timeline),
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
            f"a report needs {TEMPLATES}, which is not installed; install it with: {remedies.install('mtrain-ui')}"
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


class HtmlReport(Reporter):
    """The report of a run, written once its job has ended; the ranks have none."""

    @classmethod
    def is_on(cls, rank: int) -> bool:
        """Return False: a rank reports nothing to it."""
        return False

    @classmethod
    def write_page(cls, folder: Path) -> Path | None:
        """Write the report, if the job has begun."""
        return write(folder) if (folder / METRICS).is_file() else None
