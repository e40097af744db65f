"""``mtrain train``: check, plan, start and watch a training job."""

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, job_options, spec_argument, spec_request
from mtrain.commands.plan import plan_job
from mtrain.commands.training_request import TrainRequest
from mtrain.spec import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain.jobs.job import Outcome
    from mtrain.spec.config import Loaded


@click.command(
    "train",
    cls=JobCommand,
    examples=(
        ("mtrain", "train ./mtrain.yml, or else the embedded demo"),
        ("mtrain -c yolov5n_bccd --epochs 50 --lr 0.005", "a shipped spec, with two other values"),
        ("mtrain -c spec.yml -b horovod --nproc-per-node 2", "another backend, on two ranks"),
        ("mtrain -c spec.yml --resume", "go on with the newest run of this name"),
        ("mtrain -c spec.yml --cluster ssh -H node1,node2", "start on two hosts from here"),
    ),
)
@job_options
@spec_argument
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    request = TrainRequest(spec=spec_request(params), resume=params["resume"], any_name=True)
    context.exit(train_job(request, dry_run=params["dry_run"]))


def run_training(request: TrainRequest, *, tell: Callable[[str], None] = lambda line: None) -> "Outcome":
    """Train and wait for the end; then write the report of the run, if the spec asks for plots.

    Args:
        request: what is trained.
        tell: receives the lines of the result.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    from mtrain.jobs import job
    from mtrain.jobs.hosts import allocated_hosts

    # Once and for all: the newest run may be another one when the spec has been read.
    request = request.with_latest_run()
    loaded = allocated_hosts.complete(request.load())
    outcome = job.train(loaded, resume=request.resume, quiet=request.quiet)
    for line in outcome.lines:
        tell(line)
    # Here and not in a rank: the page is of a job that has ended, with its verdict, and a rank that fails writes none.
    if loaded.spec.report.plots:
        from mtrain.records.choosing import write_page  # the import takes a moment

        def warn(text: str) -> None:
            terminal.say(text, err=True)

        page = write_page(loaded.registry, outcome.run_dir, code=outcome.code, warn=warn)
        if page is not None:
            tell(f"report:      open {page}")
    if outcome.code == 0 and outcome.run_dir is not None and can_predict(loaded, outcome.summary):
        files = "TEXT.txt" if loaded.job.model_class.kind == "language" else "IMAGES..."
        tell(f"next:        mtrain predict {files} --run {shlex.quote(str(outcome.run_dir))}")
    return outcome


def can_predict(loaded: "Loaded", summary: Mapping[str, Any]) -> bool:
    """Return whether ``mtrain predict`` takes a run: it was scored, and its network is that of a model plugin."""
    from mtrain.spec import references

    return loaded.script is None and bool(summary.get("best")) and not references.is_reference(loaded.spec.model.name)


def train_job(request: TrainRequest, *, dry_run: bool) -> int:
    """Train and print the result, or print the plan; return the exit code."""
    if dry_run:
        terminal.say(plan_job(request, tell=lambda note: terminal.say(note, err=True)).text(), nl=False)
        return 0
    lines: list[str] = []  # printed when all is done and written: nobody may read them any more
    outcome = run_training(request, tell=lines.append)
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

    from mtrain.records.wording import class_lines

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

    from mtrain.records.wording import class_table

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
