"""``mtrain prune``: make a smaller network of a trained one."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.completing import complete_config
from mtrain.cli.options import JobCommand, load_job

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source


@click.command("prune", cls=JobCommand)
@click.option(
    "-c",
    "--config",
    metavar="SPEC",
    shell_complete=complete_config,
    help="The spec of the weights. Default: the run's.",
)
@click.option(
    "--opt", "--override", "overrides", multiple=True, metavar="PATH=VALUE ...", help="Set values of the spec."
)
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint.")
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
    "--sensitivity", is_flag=True, help="Also mask 10 to 90 % of each group alone and score it: many evaluations."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.option(
    "-o", "--out", "--output", "out", metavar="FOLDER", required=True, help="New folder for spec.yml and the weights."
)
@click.pass_context
def prune(context: click.Context, /, **params: Any) -> None:
    """Remove the least important channels of a trained model; write a smaller network that trains like any other."""
    from mtrain.pruning import command, tables
    from mtrain.pruning.worker import WEIGHTS

    overrides = tuple(params.pop("overrides") or ())
    request = command.Request(**params)

    def load(config: "Source", needed: Mapping[str, Any]) -> "Loaded":
        further = [f"{path}={json.dumps(value)}" for path, value in needed.items()]  # JSON is read as YAML
        return load_job({"config": config, "overrides": (*overrides, *further)})

    result = command.prune(request, load)
    if result.code == 0:
        for line in tables.lines(result.report):
            click.echo(line)
        click.echo(f"written: {result.out / command.SPEC}, {result.out / WEIGHTS}")
    context.exit(result.code)
