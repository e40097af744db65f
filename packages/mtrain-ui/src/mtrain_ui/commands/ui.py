"""``mtrain ui``: a read-only web page over a folder of runs."""

from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal


@click.command("ui", cls=Command)
@click.argument("runs", type=click.Path(path_type=Path), default=Path("runs"), metavar="[RUNS]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8600,
    show_default=True,
    help="Port to listen on; 0: one that is free.",
)
def ui(runs: Path, host: str, port: int) -> None:
    """Show runs in a browser: their state, live curves, logs, reports, and several over each other.

    RUNS is the folder of the run folders; it is only read. Default: runs.
    """
    from mtrain_ui.functions import serve_pages

    serve_pages(runs, host=host, port=port, tell=lambda text: terminal.say(text, err=text.startswith("warning")))
