"""``mtrain predict``: apply trained weights to images or texts; write the results as JSON and as drawings."""

from typing import Any

import click

from mtrain.commands.options import JobCommand, spec_options, spec_request
from mtrain.spec import terminal

SHOWN = 3
"""Number of continued texts that are printed."""


@click.command("predict", cls=JobCommand)
@spec_options
@click.argument("sources", nargs=-1, required=True, metavar="FILE|FOLDER ...")
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint. Default: runs/latest.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option(
    "--weights",
    metavar="FILE",
    help="An exported .onnx; or a file of weights, which needs -c or --run, and data.names.",
)
@click.option(
    "--out",
    "--output",
    "out",
    metavar="FOLDER",
    default="predictions",
    show_default=True,
    help="Where results are written.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.25,
    show_default=True,
    help="Lowest score kept.",
)
@click.option("--draw/--no-draw", default=True, help="Also write the images with what was found.")
@click.option("--strict", is_flag=True, help="Stop at an image that cannot be read. Default: skip it with a warning.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.pass_context
def predict(context: click.Context, /, **params: Any) -> None:
    """Find objects in images, or their classes, or continue texts, with the averaged weights of a checkpoint."""
    from mtrain.api.prediction import PredictRequest
    from mtrain.api.prediction import predict as predict_on

    spec = spec_request({name: params.pop(name) for name in ("config", "overrides")})
    request = PredictRequest(spec=spec, **params)
    result = predict_on(request)
    if result.skipped:
        head = f"warning: skipped {len(result.skipped)} images that cannot be read (--strict stops there)"
        terminal.say(f"{head}:\n{result.skipped_text()}", err=True)
    if result.code == 0:
        total = result.images + len(result.skipped)
        left_out = f" ({len(result.skipped)} of {total} skipped)" if result.skipped else ""
        if result.texts:
            terminal.say(f"{len(result.texts)} texts{left_out} continued")
            for text in result.texts[:SHOWN]:
                terminal.say(text)
        else:
            count = f"{len(result.predictions)} predictions with a score >= {request.confidence:g}"
            terminal.say(f"{result.images} images{left_out}: {count}")
        terminal.say(f"found:     {result.found_file}")
        if result.skipped:
            terminal.say(f"skipped:   {result.skipped_file}")
        if request.draw and not result.texts:
            terminal.say(f"images:    {result.out}")
    context.exit(result.code)
