"""``mtrain predict``: apply trained weights to pictures; write the results as JSON and as drawings."""

from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, loader, spec_options

if TYPE_CHECKING:
    pass


@click.command("predict", cls=JobCommand)
@spec_options
@click.argument("sources", nargs=-1, required=True, metavar="PICTURE|FOLDER ...")
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
@click.option("--draw/--no-draw", default=True, help="Also write the pictures with what was found.")
@click.option("--strict", is_flag=True, help="Stop at a picture that cannot be read. Default: skip it with a warning.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.pass_context
def predict(context: click.Context, /, **params: Any) -> None:
    """Find objects in pictures, or their classes, with the averaged weights of a checkpoint."""
    from mtrain.cluster import prediction
    from mtrain.data.reading import listed
    from mtrain.rank.predict import SKIPPED

    overrides = tuple(params.pop("overrides") or ())
    request = prediction.Request(**params)

    result = prediction.predict(request, loader(overrides))
    if result.skipped:
        problems = listed([f"{entry['file_name']}: {entry['reason']}" for entry in result.skipped])
        head = f"warning: skipped {len(result.skipped)} pictures that cannot be read (--strict stops there)"
        click.echo(f"{head}:\n{problems}", err=True)
    if result.code == 0:
        total = result.pictures + len(result.skipped)
        left_out = f" ({len(result.skipped)} of {total} skipped)" if result.skipped else ""
        count = f"{len(result.predictions)} predictions with a score >= {request.confidence:g}"
        click.echo(f"{result.pictures} pictures{left_out}: {count}")
        click.echo(f"found:     {result.out / prediction.PREDICTIONS}")
        if result.skipped:
            click.echo(f"skipped:   {result.out / SKIPPED}")
        if request.draw:
            click.echo(f"pictures:  {result.out}")
    context.exit(result.code)
