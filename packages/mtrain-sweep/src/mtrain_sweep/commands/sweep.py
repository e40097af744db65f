"""``mtrain sweep``: search for good values of a spec, by trials that are jobs of their own."""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands import functions, python_calls
from mtrain.commands.options import JobCommand, host_options, load_job
from mtrain.errors import UsageError
from mtrain.spec import terminal
from mtrain.spec.calls import explain_calls
from mtrain_sweep import starting
from mtrain_sweep.definition import PRUNERS, SAMPLERS, Pruner, Sampler
from mtrain_sweep.request import SweepRequest
from mtrain_sweep.results import SweepResult, result_in

if TYPE_CHECKING:
    from mtrain_sweep.search import SweepVerdict


@click.command(
    "sweep",
    cls=JobCommand,
    examples=(("mtrain sweep -c spec.yml --space space.yml --trials 20", "20 trials from a search space"),),
)
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
def command(context: click.Context, /, **params: Any) -> None:
    """Search for good values of a spec.

    Exit code: 0 done, 1 too many trials failed, 2 wrong use, 130 or 143 ended by a signal; --resume goes on.
    """
    if params["show"] is not None:
        show(params["show"])
        return
    own = {field.name for field in fields(SweepRequest)}
    spec_params = {name: value for name, value in params.items() if name not in {*own, "show"}}
    request = python_calls.request_of(
        SweepRequest,
        params,
        load=lambda: load_job(spec_params),
        named=any(value not in (None, (), False) for value in spec_params.values()),
        tell=lambda text: terminal.say(text, err=True),
    )
    folder, verdict = _run(request)
    show(folder)
    if verdict.text:
        terminal.say(verdict.text if verdict.reason == "interrupted" else f"error: {verdict.text}", err=True)
    context.exit(verdict.code)


def show(folder: Path) -> None:
    """Print the table of a sweep without columns in which no trial has a value, its best trial and its files.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    from rich.console import Console
    from rich.table import Table

    from mtrain_sweep.outputs import BEST, TABLE
    from mtrain_sweep.table import best_trial, columns, rows, show_cell

    opened = starting.open_sweep(folder)
    names, cells = columns(opened.definition), rows(opened.definition, opened.trials)
    kept = [i for i in range(len(names)) if any(row[i] is not None for row in cells)]
    best = best_trial(opened.definition, opened.trials)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=f"sweep {opened.folder.name}", title_justify="left", title_style="bold")
    for i in kept:
        table.add_column(names[i], justify="left" if names[i] in ("state", "reason") else "right", overflow="fold")
    for row in cells:
        is_best = best is not None and row[0] == best.number
        table.add_row(*(show_cell(row[i]) for i in kept), style="bold" if is_best else None)
    console.print(table)
    if best is not None:
        text = f"best: trial {best.number}, {opened.definition.metric} {show_cell(best.value)}"
        console.print(text, markup=False)
    for word, name in (("table", TABLE), ("best spec", BEST)):
        if (file := opened.folder / name).exists():
            console.print(f"{word}: {file}", markup=False, soft_wrap=True)


@explain_calls
def sweep(  # noqa: PLR0913 - what the command takes
    spec: python_calls.SpecSource = None,
    *,
    space: python_calls.File | Mapping[str, Any] = None,
    over: Mapping[str, Sequence[Any]] | None = None,
    trials: int | None = None,
    jobs: int = 1,
    sampler: Sampler | None = None,
    pruner: Pruner | None = None,
    metric: str | None = None,
    out: python_calls.File = None,
    resume: bool = False,
    max_failures: int = 3,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Search for good values of a spec, by trials that are jobs of their own, and wait for the end.

    Call it from the main thread: Ctrl-C asks the trials to save and to end, and ``resume`` goes on.

    Args:
        spec: see ``mtrain.commands.functions``; as ``backend``, ``ranks`` and ``overrides``.
        space: the search space: a YAML file, the name of a shipped one, or a dict of its content.
        over: values that are combined with all others, such as ``{"backend": ["ddp", "horovod"], "ranks": [1, 2]}``.
        trials: number of trials in all; None: 20, or the whole grid.
        jobs: number of trials at the same time.
        sampler: ``grid``, ``random`` or ``tpe``; None: ``tpe``, or ``grid`` where only ``over`` is given.
        pruner: ``median`` or ``halving`` end bad trials early; None: no trial is ended.
        metric: a metric of the evaluations; higher is better, ``NAME:min``: lower is; None: ``score``.
        out: folder of the sweep; None: ``runs/NAME-sweep``.
        resume: go on with the sweep in ``out``, by default the newest one.
        max_failures: so many failed trials in a row end the sweep.
        quiet: print nothing of what is going on.

    Raises:
        UsageError: the spec, the space or an option is wrong; nothing was started.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("mtrain.sweep was called from another thread; call it from the main thread")
    for name, value, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        if value is not None and value not in known:
            raise UsageError(f"{name}={value!r}: expected one of {', '.join(known)}")
    request = python_calls.request_of(
        SweepRequest,
        locals(),
        load=lambda: functions.load_spec(spec, backend=backend, ranks=ranks, overrides=overrides),
        named=spec is not None or bool(overrides) or backend is not None or ranks is not None,
        space=space if isinstance(space, Mapping) or space is None else Path(space),
        over=[f"{name}={','.join(map(str, values))}" for name, values in (over or {}).items()],
        tell=python_calls.teller(quiet=quiet),
    )
    folder, verdict = _run(request)
    if verdict.text:
        request.tell(verdict.text)
    return result_in(folder, verdict.reason)


def _run(request: SweepRequest) -> "tuple[Path, SweepVerdict]":
    """Run a sweep to its end; return its folder and how it ended.

    Raises:
        UsageError: the spec, the space or an option is wrong; nothing was started.
    """
    from mtrain_sweep import search

    plan = starting.prepare(request)
    return plan.folder, search.run(plan)
