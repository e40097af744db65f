"""``mtrain prune``: make a smaller network of a trained one."""

from typing import Any

import click

from mtrain.commands.options import JobCommand, named_run, run_argument, spec_options, spec_request, values_and_output
from mtrain.spec import terminal


@click.command("prune", cls=JobCommand)
@spec_options
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option("--weights", metavar="FILE", help="A file of weights; needs -c.")
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True),
    required=True,
    help="Share of the FLOPs that is to be left, such as 0.5.",
)
@click.option(
    "--by",
    type=click.Choice(["bn", "l1", "taylor"]),
    default="l1",
    show_default=True,
    help="What makes a channel important: the scale of its BatchNorm, its filter's size, or weight times gradient.",
)
@click.option(
    "--sensitivity", is_flag=True, help="Also mask shares of each group alone and score what is left on some samples."
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Samples of the evaluation split that --sensitivity scores.",
)
@click.option(
    "--shares",
    metavar="A,B",
    default="0.25,0.5,0.75",
    show_default=True,
    help="Shares of a group's channels that --sensitivity masks, one evaluation each.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.option(
    "--out", "--output", "out", metavar="FOLDER", help="New folder for spec.yml and the weights; `-o FOLDER` too."
)
@click.pass_context
def prune(context: click.Context, /, **params: Any) -> None:
    """Remove the least important channels of a trained model; write a smaller network that trains like any other.

    RUN is a run folder: its spec and its best checkpoint.
    """
    from mtrain_deploy import deploying

    overrides, out = values_and_output(params.pop("overrides"), params.pop("out"))
    if out is None:
        raise click.UsageError("no folder to write: give -o FOLDER")
    try:
        params["shares"] = tuple(float(share) for share in params["shares"].split(","))
    except ValueError:
        raise click.UsageError(f"--shares {params['shares']}: expected numbers, such as 0.25,0.5") from None
    spec = spec_request({"config": params.pop("config"), "overrides": overrides})
    result = deploying.prune(deploying.PruneRequest(run=named_run(params), spec=spec, out=out, **params))
    if result.code == 0:
        for line in result.lines():
            terminal.say(line)
    context.exit(result.code)
