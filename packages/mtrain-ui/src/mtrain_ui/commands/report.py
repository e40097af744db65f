"""``mtrain report``: write everything about a run into one HTML file."""

from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal


@click.command("report", cls=Command)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "-o",
    "--out",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write. Default: report.html in the run folder.",
)
def report(run: Path, out: Path | None) -> None:
    """Write report.html of a run: its curves, metrics, images, spec and environment in one file.

    RUN is a run folder, such as runs/digits, also of a run that goes on or has failed.
    """
    from mtrain_ui.functions import write_report

    terminal.say(f"report: {write_report(run, out=out)}")
