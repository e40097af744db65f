"""``mtrain train``: check, plan, start and watch a training job."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, job_options, spec_request
from mtrain.spec import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain.api.training import TrainRequest


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.api.training import TrainRequest

    request = TrainRequest(spec=spec_request(params), resume=params["resume"], any_name=True)
    context.exit(train_job(request, dry_run=params["dry_run"]))


def train_job(request: "TrainRequest", *, dry_run: bool) -> int:
    """Train and print the result, or print the plan; return the exit code."""
    from mtrain.api import planning, training

    if dry_run:
        plan = planning.plan(request, tell=lambda note: terminal.say(note, err=True))
        terminal.say(plan.text(), nl=False)
        return 0
    lines: list[str] = []  # printed when all is done and written: nobody may read them any more
    outcome = training.train(request, tell=lines.append)
    # A terminal gets the classes as a table, a log one line for each metric.
    if lines and not sys.stdout.isatty():
        terminal.say("\n".join(lines))
    elif lines:
        show_result(lines, outcome.summary.get("best") or {})
    return outcome.code


def show_result(lines: Sequence[str], best: Mapping[str, Any]) -> None:
    """Print the lines of a result on a terminal: the best evaluation in bold, the metrics of classes as a table."""
    from rich.console import Console
    from rich.text import Text

    from mtrain.api.training import class_lines

    console, of_classes = Console(highlight=False), class_lines(best)
    for line in lines:
        if line in of_classes:
            if line == of_classes[0]:
                console.print(_class_table(best))
            continue
        is_best = line.startswith("best evaluation: ")
        console.print(Text(terminal.printable(line), style="bold green" if is_best else ""), soft_wrap=True)


def _class_table(best: Mapping[str, Any]) -> "Table":
    """Return the metrics of the classes; the highest value of each column is bold."""
    from rich.table import Table
    from rich.text import Text

    from mtrain.api.training import class_table

    columns, rows = class_table(best)
    table = Table("class", *columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    numbers = [
        [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        for values in zip(*rows.values(), strict=True)
    ]
    highest = [max(column, default=None) for column in numbers]
    for name, values in rows.items():
        cells = [
            Text(f"{value:.4f}" if isinstance(value, int | float) else "-", style="bold" if value == most else "")
            for value, most in zip(values, highest, strict=True)
        ]
        table.add_row(Text(terminal.one_line(name)), *cells)
    return table
