"""Pages about runs, from Python: what ``mtrain report`` and ``mtrain ui`` do."""

import os
from collections.abc import Callable
from pathlib import Path

from mtrain.spec import terminal
from mtrain.spec.calls import explained


@explained
def write_report(run: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None) -> Path:
    """Write everything about a run into one HTML file; return its path.

    Args:
        run: the run folder, also of a run that goes on or has failed.
        out: the file to write; None: ``report.html`` in the run folder.

    Raises:
        UsageError: the folder is none of a run, or the file cannot be written.
    """
    from mtrain_ui.pages.report import write

    return write(Path(run), None if out is None else Path(out))


@explained
def serve_runs(runs: str | os.PathLike[str] = "runs", *, host: str = "127.0.0.1", port: int = 8600) -> None:
    """Show runs in a browser until Ctrl-C: their state, live curves, logs, reports, and several over each other.

    Args:
        runs: the folder of the run folders, which is only read.
        host: address to listen on.
        port: port to listen on; 0: one that is free. The address is printed.

    Raises:
        UsageError: there is no such folder, the port is taken, or the extra ``ui`` is not installed.
    """
    serve_pages(Path(runs), host=host, port=port, tell=lambda text: terminal.say(text, err=True))


def serve_pages(runs: Path, *, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Show runs in a browser; ``tell`` receives the address and warnings. See ``serve_runs``."""
    from mtrain_ui.pages.server import serve

    serve(runs, host=host, port=port, tell=tell)
