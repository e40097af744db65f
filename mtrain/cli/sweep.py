"""``mtrain sweep``: search for good values of a spec, by trials that are jobs of their own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, host_options, load_job

if TYPE_CHECKING:
    from mtrain.sweeping.starting import Opened

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
    help="A figure of the evaluations, else score. Higher is better, or lower with :min.",
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
    from mtrain.sweeping import starting

    starting.need_libraries()
    if params["show"] is not None:
        show(starting.opened(params["show"]))
        return
    from mtrain.sweeping import sweep as sweeps

    own = {"space", "over", "trials", "jobs", "sampler", "pruner", "metric", "out", "resume", "max_failures"}
    spec_params = {name: value for name, value in params.items() if name not in {*own, "show"}}
    wish = starting.Wish(
        load=lambda: load_job(spec_params),
        named=any(value not in (None, (), False) for value in spec_params.values()),
        tell=lambda text: click.echo(text, err=True),
        **{name: params[name] for name in own},
    )
    order = starting.order_of(wish)
    verdict = sweeps.run(order)
    show(starting.opened(order.folder))
    if verdict.text:
        click.echo(verdict.text if verdict.reason == "interrupted" else f"error: {verdict.text}", err=True)
    context.exit(verdict.code)


def show(opened: "Opened") -> None:
    """Print the table of a sweep, its best trial and its files."""
    from rich.console import Console
    from rich.table import Table

    from mtrain.sweeping.table import best_trial, columns, rows, shown

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    names = columns(opened.request)
    empty = {name for i, name in enumerate(names) if all(row[i] is None for row in rows(opened.request, opened.trials))}
    table = Table(title=f"sweep {opened.folder.name}", title_justify="left", title_style="bold")
    for name in names:
        if name not in empty:
            table.add_column(name, justify="left" if name in ("state", "reason") else "right", overflow="fold")
    best = best_trial(opened.request, opened.trials)
    for row in rows(opened.request, opened.trials):
        cells = [shown(cell) for name, cell in zip(names, row, strict=True) if name not in empty]
        table.add_row(*cells, style="bold" if best is not None and row[0] == best.number else None)
    console.print(table)
    if best is not None:
        console.print(f"best: trial {best.number}, {opened.request.metric} {shown(best.value)}", markup=False)
    files = {"table": "trials.csv", "best spec": "best.yml", "trials": "parallel.png", "importance": "importance.png"}
    for word, file in files.items():
        if (opened.folder / file).exists():
            console.print(f"{word}: {opened.folder / file}", markup=False, soft_wrap=True)
