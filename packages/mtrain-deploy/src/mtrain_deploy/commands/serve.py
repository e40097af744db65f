"""``mtrain serve``: answer HTTP requests with the predictions of an exported model."""

from pathlib import Path
from typing import Any

import click

from mtrain.commands.options import JobCommand
from mtrain.spec import terminal

SERVED = "served.onnx"
"""File in a run folder that is written where a run is served."""


@click.command(
    "serve",
    cls=JobCommand,
    examples=(
        ("mtrain serve --weights digits.onnx --port 8080", "answer requests at port 8080 of this machine"),
        ("mtrain serve runs/digits", "export the best checkpoint of a run, and serve it"),
    ),
)
@click.argument("run_or_file", metavar="[RUN|FILE]", required=False)
@click.option("--weights", metavar="FILE", help="An ONNX file that `mtrain export` wrote, in place of a run.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on. There is no authentication."
)
@click.option("--port", type=int, default=8080, show_default=True, help="Port to listen on; 0: a free one.")
@click.option("--max-batch", type=int, help="Most images computed at once. Default: as exported, else 8.")
@click.option(
    "--max-wait-ms", type=float, default=0.0, show_default=True, help="How long an image waits for a full batch."
)
@click.option(
    "--max-body", "max_body_mb", type=int, default=16, show_default=True, metavar="MB", help="Largest request."
)
@click.option(
    "--max-pixels", type=int, default=50_000_000, show_default=True, help="Pixels of the largest image decoded."
)
@click.option("--max-request-pixels", type=int, help="Pixels of all images of a request. Default: twice --max-pixels.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="For a request to arrive and to be answered.",
)
@click.option("--queue", type=int, default=64, show_default=True, help="Most images in work; others are refused.")
@click.option("--threads", type=int, help="Threads that compute, and as many that decode. Default: one for each core.")
@click.option(
    "--max-connections-per-address",
    type=int,
    default=128,
    show_default=True,
    help="Connections open from one address; 0, behind a proxy: no limit.",
)
@click.pass_context
def serve(context: click.Context, /, run_or_file: str | None, weights: str | None, **settings: Any) -> None:
    """Answer HTTP requests with predictions: POST images to /v1/predict, or open the address in a browser.

    RUN is a run folder, whose best checkpoint is exported first. Default: runs/latest.
    """
    from mtrain_deploy.serving import serve as serve_model

    if run_or_file is not None and weights is not None:
        raise click.UsageError(f"two models are given: {run_or_file} and --weights {weights}; keep one")
    if run_or_file is not None and run_or_file.endswith(".onnx"):
        weights = run_or_file
    if weights is None:
        weights = _export(run_or_file)
    context.exit(serve_model(weights, say=lambda line: terminal.say(line, err=line.startswith("warning")), **settings))


def _export(run: str | None) -> str:
    """Write the best checkpoint of a run as an ONNX file in its folder, and return the file."""
    from mtrain_deploy.exporting.job import export_weights
    from mtrain_deploy.exporting.request import ExportRequest

    file = Path(run or "runs/latest") / SERVED
    result = export_weights(ExportRequest(run=run, out=file, force=True))
    if result.code != 0:
        raise click.exceptions.Exit(result.code)
    return str(file)
