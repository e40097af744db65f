"""``mtrain ui``: a read-only web page over a folder of runs."""

import os
from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal
from mtrain.spec.calls import explain_calls


@click.command("ui", cls=Command, examples=(("mtrain ui", "the runs in ./runs, at http://127.0.0.1:8600"),))
@click.argument("runs", type=click.Path(path_type=Path), default=Path("runs"), metavar="[RUNS]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="Port to listen on; 0: one that is free.",
)
def command(runs: Path, host: str, port: int) -> None:
    """Show runs in a browser: their state, live curves, logs, reports, and several over each other.

    RUNS is the folder of the run folders; it is only read. Default: runs.
    """
    from mtrain_ui.pages.server import serve

    serve(runs, host=host, port=port, tell=lambda text: terminal.say(text, err=text.startswith("warning")))


@explain_calls
def serve_runs(runs: str | os.PathLike[str] = "runs", *, host: str = "127.0.0.1", port: int = 8600) -> None:
    """Show runs in a browser until Ctrl-C: their state, live curves, logs, reports, and several over each other.

    Args:
        runs: the folder of the run folders, which is only read.
        host: address to listen on.
        port: port to listen on; 0: one that is free. The address is printed.

    Raises:
        UsageError: there is no such folder, the port is taken, or a library is not installed.
    """
    from mtrain_ui.pages.server import serve

    serve(Path(runs), host=host, port=port, tell=lambda text: terminal.say(text, err=True))
