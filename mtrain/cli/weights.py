"""``mtrain weights``: import weights from other programs, export weights for them, and show the content of a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mtrain.cli.completing import complete_model

if TYPE_CHECKING:
    from mtrain.core.interfaces import Array
    from mtrain.spec.plugins import Policy
    from mtrain.weights.models import Expected
    from mtrain.weights.reading import Weights

PATH = click.Path(path_type=Path)
MIB = 2**20


@click.group()
def weights() -> None:
    """Read, convert and show files of weights. Nothing that a file holds is executed."""


@weights.command("import")
@click.argument("file", type=PATH)
@click.option("--model", required=True, shell_complete=complete_model, help="The model that the weights are of.")
@click.option("--to", "target", type=PATH, required=True, metavar="OUT.safetensors", help="Where they are written.")
@click.option("--force", is_flag=True, help="Replace OUT.")
def import_(file: Path, model: str, target: Path, *, force: bool) -> None:
    """Read FILE (.pdparams, .pt, .pth, .safetensors, a checkpoint or run) and write it under the names used here."""
    from mtrain.errors import CheckpointError
    from mtrain.weights.writing import check_target

    if target.suffix != ".safetensors":
        raise CheckpointError(f"--to {target}: import writes .safetensors; for other endings: mtrain weights export")
    check_target(target, force=force)
    _convert(file, model, target)


@weights.command()
@click.argument("file", type=PATH)
@click.option("--model", shell_complete=complete_model, help="The model that the weights are of; a checkpoint knows.")
@click.option(
    "--to",
    "target",
    type=PATH,
    required=True,
    metavar="OUT",
    help="OUT.pdparams for Paddle, OUT.pt or OUT.pth for torch.",
)
@click.option("--force", is_flag=True, help="Replace OUT.")
@click.option("--deploy", is_flag=True, help="The form for inference: branches that add up become one convolution.")
def export(file: Path, model: str | None, target: Path, *, force: bool, deploy: bool) -> None:
    """Write the weights of FILE, a checkpoint or a run under the names of the original program."""
    from mtrain.weights.writing import check_target

    check_target(target, force=force)
    _convert(file, model, target, deploy=deploy)


@weights.command()
@click.argument("file", type=PATH)
def show(file: Path) -> None:
    """List names, types and shapes as FILE has them."""
    from mtrain.weights.reading import read

    file_weights = read(file)
    click.echo(_described(file_weights))
    width = max((len(name) for name in file_weights.arrays), default=0)
    for name, array in file_weights.arrays.items():
        click.echo(f"{name:<{width}}  {array.dtype!s:<8}  {tuple(array.shape)}")


def _convert(file: Path, model: str | None, target: Path, *, deploy: bool = False) -> None:
    from mtrain.errors import CheckpointError
    from mtrain.weights.models import expected, policy_of
    from mtrain.weights.names import exported
    from mtrain.weights.reading import read
    from mtrain.weights.writing import LAYOUTS, write

    file_weights = read(file)
    click.echo(_described(file_weights))
    name = model or file_weights.model
    if name is None:
        raise CheckpointError(f"{file} does not say of which model it is; give --model NAME (mtrain plugins list)")
    own = name == file_weights.model
    target_model = expected(
        file_weights,
        name,
        options=file_weights.options if own else None,
        pruned=file_weights.pruned if own else None,
    )
    if target_model is None:
        raise CheckpointError(
            f"--model {name}: its state is not known without a framework; train with it as model.weights"
        )
    arrays = _fitted(file_weights, target_model)
    if deploy:
        arrays = _fused(arrays, target_model, policy=policy_of(file_weights))
        click.echo(f"for inference: {len(arrays)} arrays")
    write(target, exported(arrays, target_model.published, layout=LAYOUTS[target.suffix]))
    click.echo(f"written: {target} ({target.stat().st_size / MIB:.1f} MiB)")


def _fitted(file_weights: "Weights", target_model: "Expected") -> "Mapping[str, Array]":
    """Return the file's arrays under the model's names and in its types; print what does not fit.

    Counters that the file does not hold are 0.
    """
    import numpy as np

    from mtrain.weights.models import fitted

    result = fitted(file_weights, target_model)
    classes = f" with {target_model.classes} classes" if target_model.classes is not None else ""
    part = f", as its `{result.prefix.rstrip('.')}`" if result.prefix else ""
    click.echo(f"{target_model.model}{classes}: {len(result.matched)} of {len(target_model.state)} arrays taken{part}")
    if result.counters:
        click.echo(f"{len(result.counters)} counters that such files do not hold are 0")
    for sentence in result.warnings():
        click.echo(f"warning: {sentence}", err=True)
    zeros = {name: np.zeros(target_model.state[name].shape, target_model.state[name].dtype) for name in result.counters}
    arrays = {**result.matched, **zeros}
    return {name: arrays[name] for name in target_model.state if name in arrays}


def _fused(arrays: "Mapping[str, Array]", target_model: "Expected", *, policy: "Policy") -> "Mapping[str, Array]":
    """Return the state for inference, made by the model's own ``fused``."""
    from mtrain.core.interfaces import Model
    from mtrain.errors import CheckpointError
    from mtrain.spec import plugins

    missing = [name for name in target_model.state if name not in arrays]
    model: type[Model] = plugins.load("models", target_model.model, policy=policy)
    fused_arrays = None if missing else model.fused(arrays)
    if missing and model.fused is not Model.fused:
        raise CheckpointError(
            f"--deploy: needs every array of {target_model.model}; {len(missing)} are not in the file, such as {missing[0]}"
        )
    if fused_arrays is None:
        raise CheckpointError(
            f"--deploy: {target_model.model} has no form for inference of its own; leave the flag out"
        )
    return fused_arrays


def _described(file_weights: "Weights") -> str:
    size = sum(array.nbytes for array in file_weights.arrays.values())
    types = ", ".join(sorted({str(array.dtype) for array in file_weights.arrays.values()}))
    return f"{file_weights.path}: {file_weights.description}: {len(file_weights.arrays)} arrays of {types}, {size / MIB:.1f} MiB"
