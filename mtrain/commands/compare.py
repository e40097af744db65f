"""``mtrain compare``: train one spec, or run one script, on several backends; do they agree, and how fast are they."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mtrain.commands.options import JobCommand, spec_options
from mtrain.errors import CannotTell, MtrainError
from mtrain.spec import terminal
from mtrain.spec.files import path_problem

if TYPE_CHECKING:
    from mtrain.compare.results import Comparison

SAME, DIFFERENT = 0, 1
"""Exit codes of verdicts, those of ``mtrain-trace compare``."""
PROFILES = ("bitwise", "float32", "loose")
LENGTH = 50
"""Updates of each job unless the command line says otherwise."""
RECORDED = ("as_json", "bits", "calibration", "optimizer")
"""Options of the comparison of trainings that have ended."""
SCRIPT_ARGUMENTS = "mtrain.rank.script_arguments"
"""Key of the words after ``--`` in the context of the command."""


class CompareCommand(JobCommand):
    """A command whose words after ``--`` belong to a script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words after ``--`` as they were typed."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[SCRIPT_ARGUMENTS] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error has another exit code than the verdict that trainings differ."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        # "Cannot tell" has a code of its own, so that a script that asks whether two trainings agree never takes an error for a no.
        except MtrainError as error:
            if error.exit_code != DIFFERENT:
                raise
            raise CannotTell(str(error)) from error
        except Exception as error:
            words = (
                path_problem(error) or f"{type(error).__name__}: {error}; MTRAIN_DEBUG=1 shows where this comes from"
            )
            raise CannotTell(words) from error


@click.command(
    "compare",
    cls=CompareCommand,
    options_metavar="[OPTIONS]",
    epilog="Words after -- are the arguments of the script.",
    examples=(
        ("mtrain compare -c vit_digits -b ddp,horovod", "50 updates of each; the first one is the reference"),
        ("mtrain compare -b ddp,deepspeed:stage=3 --script train.py", "your own script on two backends"),
        ("mtrain compare one two", "two folders of `mtrain-trace run`: what parted first, and why"),
    ),
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[A B ...]")
@spec_options
@click.option(
    "-s", "--script", type=click.Path(path_type=Path), metavar="FILE",
    help="Run your own script, as `mtrain run` does, instead of training a spec.",
)  # fmt: skip
@click.option(
    "-b", "--backends", metavar="A,B:OPTION=VALUE,...",
    help="The reference first. OPTION is one of the backend's, or a path of the spec: ddp,deepspeed:stage=3,solo:framework=paddle.",
)  # fmt: skip
@click.option(
    "--updates", type=click.IntRange(min=1), help="Length of each job: 50; with several --ranks that of the script."
)
@click.option(
    "--ranks", default="2", show_default=True, metavar="N[,N...]",
    help="Of backends that can have several. With several numbers and --script: run any script on each, and compare them.",
)  # fmt: skip
@click.option(
    "--profile", type=click.Choice(PROFILES), default="float32", show_default=True,
    help="Largest relative difference that counts as agreement.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=0), default=1, show_default=True,
    help="Timed trainings of each backend; 0: the speed of the traced ones.",
)  # fmt: skip
@click.option(
    "--apart", is_flag=True, help="Start a job of its own for each timed training, the backends in turn.",
)  # fmt: skip
@click.option(
    "--out", "--output", "out", type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the jobs and the report; else runs/compare.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Of recorded trainings: print JSON.")
@click.option("--bits", is_flag=True, help="Of recorded trainings: exit code 1 for rounding, too.")
@click.option(
    "--calibration", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Of recorded trainings: A again, by mtrain-trace run --calibrate, which shows how rounding grows.",
)  # fmt: skip
@click.option("--optimizer", type=click.IntRange(min=0), help="Of recorded trainings: number of the optimizer; all.")
@click.pass_context
def compare(context: click.Context, /, **params: Any) -> None:
    """Train one spec, or run one script, on several backends; say which agree, and how fast each is.

    With folders of trainings that have ended (traces of `mtrain-trace run`, run folders, mixtures): say of each what parted
    first from the first one, and why.

    Exit code: 0 all agree, 1 they do not, 2 wrong use, 3 cannot tell: one did not run, or left nothing to compare.
    """
    from mtrain.compare import jobs
    from mtrain.compare.request import CompareRequest

    own = {name: params.pop(name) for name in ("folders", *RECORDED)}
    if own["folders"]:
        _refuse_jobs(context, own["folders"])
        context.exit(show_recorded(own))
    for name in RECORDED:
        if own[name]:
            raise click.UsageError(f"{_flag(name)} is for trainings that have ended; give their folders")
    ranks = _numbers(params["ranks"])
    if len(ranks) > 1:
        context.exit(show_ranks(ranks, params, context.meta[SCRIPT_ARGUMENTS]))
    if params["backends"] is None:
        raise click.UsageError("--backends is missing; or give two folders of trainings that have ended")
    arguments = context.meta[SCRIPT_ARGUMENTS]
    if arguments and params["script"] is None:
        raise click.UsageError(
            f"-- {' '.join(arguments)}: arguments for a script, but no script; name it with --script FILE"
        )
    params = {**params, "ranks": ranks[0], "updates": params["updates"] or LENGTH}
    request = CompareRequest(arguments=arguments, tell=lambda text: terminal.say(text, err=True), **params)
    comparison = jobs.compare(request)
    numbers, page = jobs.write(comparison, request.folder)
    show(comparison)
    terminal.say(f"page:  {page}\nnumbers: {numbers}")
    context.exit(SAME if comparison.agree else DIFFERENT if comparison.differ else CannotTell.exit_code)


def _numbers(text: str) -> list[int]:
    """Return the numbers of ranks that ``--ranks`` lists."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.UsageError(f"--ranks {text}: expected a number from 1, or several with commas, such as 1,2,3")
    return [int(word) for word in words]


def show_ranks(ranks: list[int], params: dict[str, Any], arguments: tuple[str, ...]) -> int:
    """Run a script on several numbers of ranks and print the comparisons; return the exit code."""
    from mtrain.compare import over_ranks

    if params["script"] is None:
        raise click.UsageError(
            f"--ranks {params['ranks']}: several numbers are for a script; name it with --script FILE"
        )
    backend = params["backends"] or "horovod"
    if "," in backend or ":" in backend:
        raise click.UsageError(f"--backends {backend}: expected one backend beside several numbers of ranks")
    config = [] if params.get("config") is None else ["-c", str(params["config"])]
    request = over_ranks.RanksRequest(
        script=params["script"],
        ranks=ranks,
        words=[*config, "--backend", backend, *(word for text in params["overrides"] for word in ("-o", text))],
        arguments=arguments,
        updates=params["updates"],
        folder=params["out"] or Path("runs/compare-ranks"),
        tell=lambda text: terminal.say(text, err=True),
    )
    results = over_ranks.compare(request)
    for number, result in results.items():
        terminal.say("\n".join(["", f"{ranks[0]} and {number} ranks:", *result.text()]))
    return _worst(result.code for result in results.values())


def _worst(codes: Iterable[int]) -> int:
    """Return the exit code of several comparisons: that some differ counts most."""
    # A difference that was found is certain, whatever could not be told of the others.
    found = set(codes)
    return DIFFERENT if DIFFERENT in found else max(found)


def _flag(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name}"


def _refuse_jobs(context: click.Context, folders: tuple[Path, ...]) -> None:
    """Refuse options of jobs beside folders of trainings that have ended: none is started."""
    typed = [
        parameter.opts[-1]
        for parameter in context.command.params
        if parameter.name not in ("folders", *RECORDED)
        and parameter.name is not None
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if typed:
        given = " ".join([*map(str, folders), *typed])
        raise click.UsageError(f"{given}: expected folders of trainings that have ended, or {typed[0]} and no folder")


def show_recorded(params: dict[str, Any]) -> int:
    """Print what parted first in trainings that have ended; return the exit code."""
    from mtrain.compare import recorded

    as_json = params.pop("as_json")
    results = recorded.compare(recorded.RecordedRequest(**params))
    if as_json:
        values = [result.json() for result in results]
        terminal.say(values[0] if len(values) == 1 else f"[{', '.join(values)}]")
    else:
        for number, result in enumerate(results):
            if len(results) > 1:
                terminal.say(f"{chr(10) if number else ''}{params['folders'][0]} and {result.folder}:")
            terminal.say("\n".join(result.text()))
    return _worst(result.code for result in results)


def show(comparison: "Comparison") -> None:
    """Print the two tables and the summary on the terminal."""
    from rich.console import Console
    from rich.table import Table

    from mtrain.compare import tables, wording

    # A log gets wide tables: folded cells are hard to search.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    shown = {"agreement": tables.agreement(comparison), "speed": tables.speeds(comparison)}
    for title, (columns, rows) in shown.items():
        left_columns = 3 if title == "agreement" else 1
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i < left_columns else "right", overflow="fold")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    style = "bold green" if comparison.agree else "bold red"
    console.print(wording.headline(comparison), style=style, markup=False)
    for sentence in wording.summary(comparison):
        mark = {True: "+", False: "!", None: "-"}[sentence.good]
        console.print(f"{mark} {sentence.text}", markup=False, soft_wrap=True)
