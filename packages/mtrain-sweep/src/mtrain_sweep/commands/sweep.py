"""``mtrain sweep``: search for good values of a spec, by trials that are jobs of their own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, host_options, load_job
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain_sweep.running import SweepTable

SAMPLERS = ("grid", "random", "tpe", "cmaes", "evolve")
PRUNERS = ("none", "median", "halving")


@click.command("sweep", cls=JobCommand)
@host_options
@click.option("--space", metavar="FILE", help="The search space: a YAML file, or the name of a shipped one: yolov5.")
@click.option(
    "--over", multiple=True, metavar="KEY=A,B",
    help="Also every one of these values: backend=ddp,deepspeed:stage=3, ranks=1,2 or a path of the spec. May be repeated.",
)  # fmt: skip
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="Trials in all; else 20, or the whole grid.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Trials at once.")
@click.option(
    "--sampler", type=click.Choice(SAMPLERS), help="What proposes values: tpe, or grid where only --over is given."
)
@click.option("--pruner", type=click.Choice(PRUNERS), help="What ends bad trials early; none otherwise.")
@click.option(
    "--metric",
    metavar="NAME[:min]",
    help="A metric of the evaluations, else score. Higher is better, or lower with :min.",
)
@click.option("--seed", type=int, help="Of the proposals, and of training: train.seed.")
@click.option(
    "--max-failures",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Failed trials in a row that end the sweep.",
)
@click.option(
    "--out",
    "--output",
    "out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of the sweep, else runs/NAME-sweep.",
)
@click.option("-r", "--resume", is_flag=True, help="Go on with the sweep in --out, else with the newest one.")
@click.option(
    "--show", type=click.Path(path_type=Path), metavar="FOLDER", help="Show the table of a sweep and start nothing."
)
@click.pass_context
def sweep(context: click.Context, /, **params: Any) -> None:
    """Search for good values of a spec.

    Exit code: 0 done, 1 too many trials failed, 2 wrong use, 130 or 143 ended by a signal; --resume goes on.
    """
    from mtrain_sweep import running as sweeping

    sweeping.need_libraries()
    if params["show"] is not None:
        show(sweeping.table_of(params["show"]))
        return
    own = {"space", "over", "trials", "jobs", "sampler", "pruner", "metric", "out", "resume", "max_failures"}
    spec_params = {name: value for name, value in params.items() if name not in {*own, "show"}}
    request = sweeping.SweepRequest(
        load=lambda: load_job(spec_params),
        named=any(value not in (None, (), False) for value in spec_params.values()),
        tell=lambda text: terminal.say(text, err=True),
        **{name: params[name] for name in own},
    )
    folder, verdict = sweeping.sweep(request)
    show(sweeping.table_of(folder))
    if verdict.text:
        terminal.say(verdict.text if verdict.reason == "interrupted" else f"error: {verdict.text}", err=True)
    context.exit(verdict.code)


def show(result: "SweepTable") -> None:
    """Print the table of a sweep, its best trial and its files."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=f"sweep {result.folder.name}", title_justify="left", title_style="bold")
    for name in result.columns:
        table.add_column(name, justify="left" if name in ("state", "reason") else "right", overflow="fold")
    for i, cells in enumerate(result.rows):
        table.add_row(*cells, style="bold" if i == result.best else None)
    console.print(table)
    if result.best_text:
        console.print(result.best_text, markup=False)
    for word, file in result.files.items():
        console.print(f"{word}: {file}", markup=False, soft_wrap=True)
