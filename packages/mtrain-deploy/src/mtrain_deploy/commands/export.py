"""``mtrain export``: write trained weights as a file that other programs can run."""

from pathlib import Path
from typing import Any

import click

from mtrain.commands.options import JobCommand, named_run, run_argument, spec_options, take_request, values_and_output
from mtrain.spec import terminal

MIB = 2**20


@click.command(
    "export",
    cls=JobCommand,
    examples=(
        ("mtrain export runs/digits", "digits.onnx"),
        ("mtrain export runs/digits --form nms --out m.onnx", "an ONNX graph with the suppression in it"),
    ),
)
@spec_options
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option("--weights", metavar="FILE", help="A file of weights; needs -c or RUN, and data.names.")
@click.option(
    "--format",
    "format",
    type=click.Choice(["onnx", "openvino", "torch", "paddle", "safetensors"]),
    default="onnx",
    show_default=True,
    help="An ONNX graph, OpenVINO's files, a torch.export program, a Paddle inference program, or the weights alone.",
)
@click.option("--out", "--output", "out", metavar="FILE", help="File to write; `-o FILE` too. Default: the run's name.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--form",
    type=click.Choice(["raw", "decoded", "nms", "nms-fixed"]),
    default="decoded",
    show_default=True,
    help="Outputs: as the last layers give them, as evaluation reads them, or detections after suppression: one list, or "
    "a list of fixed length for each image.",
)
@click.option(
    "--layout",
    type=click.Choice(["nhwc", "nchw"]),
    default="nhwc",
    show_default=True,
    help="Axes of images: channels last or first.",
)
@click.option(
    "--input",
    type=click.Choice(["uint8", "float"]),
    default="uint8",
    show_default=True,
    help="Pixels of images: 0 to 255, or float32 from 0 to 1.",
)
@click.option("--dynamic-batch/--no-dynamic-batch", default=True, help="Any number of images in a batch.")
@click.option(
    "--batch-size", "--batch", "batch", type=click.IntRange(1, 4096), default=None, help="That many in a batch."
)
@click.option("--dynamic-size", is_flag=True, help="Images of any size that the model can take.")
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True, help="Of weights.")
@click.option("--opset", type=click.IntRange(18, 24), help="ONNX's set of operators. Default: the exporter's.")
@click.option("--confidence", type=click.FloatRange(0, 1, max_open=True), help="With suppression: lowest score kept.")
@click.option("--iou-threshold", type=click.FloatRange(0, 1, min_open=True), help="With suppression: largest overlap.")
@click.option("--max-detections", type=click.IntRange(1), help="With suppression: most findings in an image.")
@click.pass_context
def export(context: click.Context, /, **params: Any) -> None:
    """Write the averaged weights of a checkpoint as a program for inference, with classes and preprocessing.

    RUN is a run folder: its spec and its best checkpoint. Default: runs/latest.
    """
    from mtrain_deploy.exporting.job import export_weights
    from mtrain_deploy.exporting.request import ExportRequest

    params["overrides"], out = values_and_output(params["overrides"], params.pop("out"))
    suppression = {name: params.pop(name) for name in ("confidence", "iou_threshold", "max_detections")}
    has_any_batch = params.pop("dynamic_batch")
    request = take_request(
        ExportRequest,
        params,
        run=named_run(params),
        out=None if out is None else Path(out),
        batch=params.pop("batch") or (None if has_any_batch else 1),
        suppression={name: value for name, value in suppression.items() if value is not None},
    )
    result = export_weights(request)
    for path in result.files:
        terminal.say(f"written: {path} ({path.stat().st_size / MIB:.1f} MiB)")
    if result.facts.get("outputs"):
        terminal.say(f"outputs: {', '.join(result.facts['outputs'])}")
    context.exit(result.code)
