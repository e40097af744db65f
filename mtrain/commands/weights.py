"""``mtrain weights``: import weights from other programs, export weights for them, and show the content of a file."""

from pathlib import Path
from typing import Literal

import click

from mtrain.commands.completing import complete_plugin
from mtrain.commands.helping import Group
from mtrain.spec import terminal

PATH = click.Path(path_type=Path)


@click.group(cls=Group)
def weights() -> None:
    """Read, convert and show files of weights. Nothing that a file holds is executed."""


@weights.command("import")
@click.argument("file", type=PATH)
@click.option(
    "--model", required=True, shell_complete=complete_plugin("models"), help="The model that the weights are of."
)
@click.option(
    "--to", "--out", "-o", "target", type=PATH, required=True, metavar="OUT.safetensors", help="Where they are written."
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An entry of model.options, where the model is not as it comes: --option path=config.json.",
)
@click.option("--force", is_flag=True, help="Replace OUT.")
def import_(file: Path, model: str, target: Path, options: tuple[str, ...], *, force: bool) -> None:
    """Read FILE and write it under the names used here.

    FILE is a .pdparams, .pt, .pth or .safetensors, a folder of torch.distributed.checkpoint, a checkpoint or a run.
    """
    from mtrain.api.weights import ConvertRequest, import_weights

    request = ConvertRequest(file=file, model=model, target=target, options=options, force=force)
    import_weights(request, tell=terminal.say, warn=_warn)


@weights.command()
@click.argument("file", type=PATH)
@click.option(
    "--model", shell_complete=complete_plugin("models"), help="The model that the weights are of; a checkpoint knows."
)
@click.option(
    "--to",
    "--out",
    "-o",
    "target",
    type=PATH,
    required=True,
    metavar="OUT",
    help="OUT.pdparams for Paddle, OUT.pt or OUT.pth for torch; of a language model OUT, a folder for transformers.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["dcp"]),
    help="dcp: OUT is a folder that torch.distributed.checkpoint.load reads. Not given: by the ending of OUT.",
)
@click.option("--force", is_flag=True, help="Replace OUT.")
@click.option("--deploy", is_flag=True, help="The form for inference: branches that add up become one convolution.")
@click.option(
    "--merge", is_flag=True, help="Adapters, added to the weights that they were trained on, as a whole model."
)
@click.option(
    "--max-file-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Weights of a folder that are larger are divided among several files with an index.",
)
def export(  # noqa: PLR0913 - the flags of the command
    file: Path,
    model: str | None,
    target: Path,
    form: Literal["dcp"] | None,
    *,
    force: bool,
    deploy: bool,
    merge: bool,
    max_file_gb: float,
) -> None:
    """Write the weights of FILE, a checkpoint or a run under the names of the original program.

    Those of your own script or model have the names of its state_dict.
    """
    from mtrain.api.weights import ConvertRequest, convert

    request = ConvertRequest(
        file=file,
        model=model,
        target=target,
        form=form,
        force=force,
        deploy=deploy,
        merge=merge,
        max_file_gb=max_file_gb,
    )
    convert(request, tell=terminal.say, warn=_warn)


@weights.command()
@click.argument("file", type=PATH)
def show(file: Path) -> None:
    """List names, types and shapes as FILE has them."""
    from mtrain.api.weights import description

    for line in description(file):
        terminal.say(line)


def _warn(text: str) -> None:
    terminal.say(text, err=True)
