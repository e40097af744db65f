"""``mtrain report``: write everything about a run into one HTML file."""

import os
from pathlib import Path

import click

from mtrain.commands.helping import Command
from mtrain.spec import terminal
from mtrain.spec.calls import explain_calls


@click.command("report", cls=Command, examples=(("mtrain report runs/digits", "write runs/digits/report.html"),))
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
def command(run: Path, out: Path | None) -> None:
    """Write report.html of a run: its curves, metrics, images, spec and environment in one file.

    RUN is a run folder, such as runs/digits, also of a run that goes on or has failed.
    """
    terminal.say(f"report: {write_report(run, out=out)}")


@explain_calls
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
