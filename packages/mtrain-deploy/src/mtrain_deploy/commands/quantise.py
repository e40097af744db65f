"""``mtrain quantise``: write an exported model whose layers compute with 8-bit integers."""

from pathlib import Path
from typing import Any

import click

from mtrain.commands.completing import complete_config
from mtrain.commands.options import JobCommand, named_run, run_argument, spec_request, values_and_output
from mtrain.spec import terminal

MIB = 2**20


@click.command("quantise", cls=JobCommand)
@click.option("--weights", metavar="FILE", help="An ONNX file that `mtrain export` wrote.")
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option(
    "-c",
    "--config",
    metavar="SPEC",
    shell_complete=complete_config,
    help="The spec whose training split calibrates. Default: that of the model.",
)
@click.option(
    "--opt", "--override", "-o", "overrides", multiple=True, metavar="PATH=VALUE ...", help="Set values of it."
)
@click.option("--out", "--output", "out", metavar="FILE", help="File to write; `-o FILE` too. Default: NAME-int8.onnx.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--samples", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Images that calibrate."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of their draw.")
@click.option(
    "--method",
    type=click.Choice(["minmax", "percentile"]),
    default="minmax",
    show_default=True,
    help="Ranges: the extremes of all values, or without the largest 0.001 % of them.",
)
@click.pass_context
def quantise(context: click.Context, /, **params: Any) -> None:
    """Quantise weights and activations to 8 bits, with ranges that training found or that images calibrate.

    RUN is a run folder, whose best checkpoint is exported. Default: runs/latest.
    """
    from mtrain_deploy import deploying

    overrides, out = values_and_output(params.pop("overrides"), params.pop("out"))
    spec = spec_request({"config": params.pop("config"), "overrides": overrides})
    request = deploying.QuantiseRequest(
        run=named_run(params), spec=spec, out=None if out is None else Path(out), **params
    )
    result = deploying.quantise(request)
    if result.path is not None:
        terminal.say(f"written: {result.path} ({result.path.stat().st_size / MIB:.1f} MiB)")
        terminal.say(f"layers: {result.layers} with 8 bits, {result.float_layers} last ones in float")
        terminal.say(f"ranges: {result.trained} trained, the others measured on {result.measured} images")
    context.exit(result.code)
