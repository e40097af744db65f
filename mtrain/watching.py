"""Pages about runs, from Python: what ``mtrain report`` and ``mtrain ui`` do."""

import os
from pathlib import Path


def write_report(run: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None) -> Path:
    """Write everything about a run into one HTML file; return its path.

    Args:
        run: the run folder, also of a run that goes on or has failed.
        out: the file to write; None: ``report.html`` in the run folder.

    Raises:
        UsageError: the folder is none of a run, or the file cannot be written.
    """
    from mtrain.pages.report import write

    return write(Path(run), None if out is None else Path(out))
