"""``mtrain weights``: import weights from other programs, export weights for them, and show the content of a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mtrain.commands.helping import CommandGroup
from mtrain.commands.options import take_request
from mtrain.errors import CheckpointError, UsageError
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain.core.interfaces import Array, Model
    from mtrain.spec.registry import Registry
    from mtrain.weights.models import Expected
    from mtrain.weights.reading import Weights
    from mtrain.weights.writing import Writer

MIB = 2**20
Tell = Callable[[str], None]
PATH = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertRequest:
    """A request to write weights under the names of another program, or of mtrain where the file is a ``.safetensors``."""

    file: Path
    """A file of weights, a checkpoint or a run."""
    target: Path
    model: str | None = None
    """The model that the weights are of; None: the file says it."""
    options: Sequence[str] = ()
    """``NAME=VALUE`` of ``model.options``, over those that the file says."""
    force: bool = False
    """Replace ``target``."""
    deploy: bool = False
    """Write the model's form for inference."""
    merge: bool = False
    """Add adapters to the weights that they were trained on, and write the whole model as a folder."""
    form: Literal["dcp", "yolov5"] | None = None
    """``dcp``: write a folder of ``torch.distributed.checkpoint``; ``yolov5``: a checkpoint of YOLOv5; None: the ending of
    ``target`` says it."""
    key: str | None = None
    """Which of several sets of weights in ``file`` is meant."""
    max_file_gb: float = 5.0
    """Weights in a folder that are larger, in 10^9 bytes, are divided among several files with an index."""


KEY = click.option("--key", metavar="KEY", help="Which of several sets of weights in FILE is meant, such as teacher.")


@click.group(cls=CommandGroup)
def weights() -> None:
    """Read, convert and show files of weights. Nothing that a file holds is executed."""


@weights.command(
    "import", examples=(("mtrain weights import yolov5s.pt --model yolov5s --to yolov5s.safetensors", ""),)
)
@click.argument("file", type=PATH)
@click.option("--model", required=True, help="The model that the weights are of.")
@click.option(
    "--to", "--out", "-o", "target", type=PATH, required=True, metavar="OUT.safetensors", help="Where they are written."
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE",
    help="An entry of model.options, where the model is not as it comes: --option path=config.json.",
)  # fmt: skip
@KEY
@click.option("--force", is_flag=True, help="Replace OUT.")
def import_(**params: Any) -> None:
    """Read FILE and write it under the names used here.

    FILE is a .pdparams, .pt, .pth or .safetensors, a folder of torch.distributed.checkpoint, a checkpoint or a run.
    """
    import_weights(take_request(ConvertRequest, params), tell=terminal.say, warn=_warn)


@weights.command(
    examples=(
        ("mtrain weights export runs/digits --to digits.pt", "for torch"),
        ("mtrain weights export runs/yolov5s --format yolov5 --to best.pt", "for YOLOv5's own programs"),
        ("mtrain weights export runs/digits --format dcp --to digits", "for torch.distributed.checkpoint"),
    )
)
@click.argument("file", type=PATH)
@click.option("--model", help="The model that the weights are of; a checkpoint knows.")
@click.option(
    "--to", "--out", "-o", "target", type=PATH, required=True, metavar="OUT",
    help="OUT.pdparams for Paddle, OUT.pt or OUT.pth for torch; of a language model OUT, a folder for transformers.",
)  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["dcp", "yolov5"]),
    help="dcp: OUT is a folder that torch.distributed.checkpoint.load reads; yolov5: OUT.pt is for YOLOv5's own "
    "programs. Not given: by the ending of OUT.",
)  # fmt: skip
@KEY
@click.option("--force", is_flag=True, help="Replace OUT.")
@click.option("--deploy", is_flag=True, help="The form for inference: branches that add up become one convolution.")
@click.option(
    "--merge", is_flag=True, help="Adapters, added to the weights that they were trained on, as a whole model."
)
@click.option(
    "--max-file-gb", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True,
    help="Weights of a folder that are larger are divided among several files with an index.",
)  # fmt: skip
def export(**params: Any) -> None:
    """Write the weights of FILE, a checkpoint or a run under the names of the original program.

    Those of your own script or model have the names of its state_dict.
    """
    convert_weights(take_request(ConvertRequest, params), tell=terminal.say, warn=_warn)


@weights.command(examples=(("mtrain weights show yolov5s.pt", "nothing in the file is executed"),))
@click.argument("file", type=PATH)
@KEY
def show(file: Path, key: str | None) -> None:
    """List names, types and shapes as FILE has them."""
    for line in describe_weights(file, key=key):
        terminal.say(line)


def _warn(text: str) -> None:
    terminal.say(text, err=True)


def import_weights(request: ConvertRequest, *, tell: Tell, warn: Tell) -> None:
    """Write weights of another program under mtrain's names; see ``convert_weights``."""
    if request.target.suffix != ".safetensors":
        raise CheckpointError(
            f"--to {request.target}: import writes .safetensors; for other endings: mtrain weights export"
        )
    convert_weights(request, tell=tell, warn=warn)


def convert_weights(request: ConvertRequest, *, tell: Tell, warn: Tell) -> None:
    """Write weights under the names that programs have which read files like ``target``.

    Args:
        request: the files and the model.
        tell: receives lines on what was read and written.
        warn: receives sentences on what does not fit.

    Raises:
        UsageError: the file cannot be read, is not of the model, or ``target`` cannot be written.
    """
    from mtrain.weights import dcp_writing
    from mtrain.weights.models import registry_for
    from mtrain.weights.names import export
    from mtrain.weights.reading import read
    from mtrain.weights.writing import LAYOUTS, check_target

    target = request.target
    if request.form is None and not target.suffix:
        _write_folder(request, tell)
        return
    if request.merge:
        raise UsageError(
            "--merge: writes a folder for transformers; give --to a name without an ending, and no --format"
        )
    if request.form == "dcp":
        dcp_writing.check_folder(target, force=request.force)
    else:
        check_target(target, force=request.force)
    file_weights = read(request.file, key=request.key)
    tell(_describe(file_weights))
    # Of a user's own module nothing is known but its names, which are those of its framework already.
    if file_weights.own is not None:
        _copy_own(file_weights, request, tell)
        return
    target_model = _target_model(file_weights, request)
    arrays = _fit(file_weights, target_model, tell=tell, warn=warn)
    if request.deploy:
        arrays = _fuse(arrays, target_model, registry=registry_for(file_weights))
        tell(f"for inference: {len(arrays)} arrays")
    layout = "torch" if request.form is not None else LAYOUTS[target.suffix]
    make = _maker(request, arrays, target_model, file_weights) if request.form == "yolov5" else None
    _write(request, export(arrays, target_model.published, layout=layout), tell=tell, make=make)


def _maker(
    request: ConvertRequest, arrays: Mapping[str, "Array"], target_model: "Expected", file_weights: "Weights"
) -> "Writer":
    """Return what makes a checkpoint of YOLOv5.

    Raises:
        CheckpointError: The weights are of another model or not whole, or the file has another ending.
    """
    from mtrain.weights.yolov5_file import check_model, pt_bytes

    check_model(target_model.model)
    missing = [name for name in target_model.state if name not in arrays]
    if request.target.suffix != ".pt" or missing:
        given = (
            f"--to {request.target}: expected the ending .pt"
            if not missing
            else f"{missing[0]} is not in {request.file}"
        )
        raise CheckpointError(f"--format yolov5: {given}, as YOLOv5's programs need")
    return partial(pt_bytes, target_model.model, class_names=file_weights.labels.get("class_names") or ())


def _write(
    request: ConvertRequest,
    arrays: Mapping[str, "Array"],
    *,
    tell: Tell,
    note: str = "",
    make: "Writer | None" = None,
) -> None:
    """Write ``arrays`` as a file or as a folder of ``torch.distributed.checkpoint``."""
    from mtrain.weights import dcp_writing
    from mtrain.weights.writing import write

    target = request.target
    if request.form == "dcp":
        dcp_writing.write_folder(target, arrays)
        files = [*target.iterdir()]
        note += f"; read it with torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={str(target)!r})"
    else:
        write(target, arrays, make=make)
        files = [target]
    size = sum(file.stat().st_size for file in files)
    tell(f"written: {target} ({size / MIB:.1f} MiB){note}")


def describe_weights(file: Path, *, key: str | None = None) -> list[str]:
    """Return lines with the names, types and shapes of the arrays in a file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    from mtrain.weights.reading import read

    file_weights = read(file, key=key)
    width = max((len(name) for name in file_weights.arrays), default=0)
    arrays = file_weights.arrays.items()
    rows = [f"{name:<{width}}  {array.dtype!s:<8}  {tuple(array.shape)}" for name, array in arrays]
    return [_describe(file_weights), *rows]


def _target_model(file_weights: "Weights", request: ConvertRequest) -> "Expected":
    """Return the names and shapes of the model that the weights are of."""
    from mtrain.weights.models import expect

    name = request.model or file_weights.model
    if name is None:
        raise CheckpointError(
            f"{request.file} does not say of which model it is; give --model NAME (mtrain plugins list)"
        )
    # Options and sizes that the file says are those of its own model; another one may not have them.
    is_own = name == file_weights.model
    stored = file_weights.options if is_own and file_weights.options else {}
    target_model = expect(
        file_weights,
        name,
        options={**stored, **_options(request.options)},
        pruned=file_weights.pruned if is_own else None,
    )
    if target_model is None:
        raise CheckpointError(
            f"--model {name}: its state is not known without a framework; train with it as model.weights"
        )
    return target_model


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` pairs as a mapping; values are read as YAML.

    Raises:
        UsageError: One of them is no pair.
    """
    from mtrain.spec.yaml_reader import parse_value

    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--option {pair}: expected NAME=VALUE, such as path=config.json")
    split = (pair.split("=", 1) for pair in pairs)
    return {name: parse_value(text) for name, text in split}


def _write_folder(request: ConvertRequest, tell: Tell) -> None:
    """Write a model of another library as a folder that this library reads.

    Raises:
        UsageError: The weights are of another model, or the folder cannot be written.
    """
    from mtrain.core.interfaces.model import WeightsFolder
    from mtrain.weights.models import registry_for
    from mtrain.weights.reading import read
    from mtrain.weights.writing import check_target

    file_weights = read(request.file)
    if file_weights.own != "plugin":
        check_target(request.target, force=request.force)
    tell(_describe(file_weights))
    options = file_weights.options or {}
    model: Model = registry_for(file_weights).make("models", str(file_weights.model), options, path="model.options")
    folder = WeightsFolder(
        path=request.target,
        arrays=file_weights.arrays,
        labels=file_weights.labels or {},
        merge=request.merge,
        force=request.force,
        max_file_bytes=request.max_file_gb * 1e9,
    )
    written = model.write_folder(folder)
    if written is None:
        check_target(request.target, force=request.force)
    tell(f"written: {request.target} {written}")


def _copy_own(file_weights: "Weights", request: ConvertRequest, tell: Tell) -> None:
    """Write the weights of a user's own module under the names of its ``state_dict``."""
    from mtrain.core.state.named_models import models_in, of_model
    from mtrain.weights.own import WORDS

    assert file_weights.own is not None, "the caller has asked"
    model, arrays = request.model, file_weights.arrays
    names = models_in(arrays)
    if model in names and names != [""]:
        _write(request, of_model(model, arrays), tell=tell, note=f", with the names of the state_dict of {model}")
        return
    if names != [""]:
        given = "no --model" if model is None else f"--model {model}"
        raise UsageError(
            f"{given}: {file_weights.path} has the models {', '.join(sorted(names))}; give --model {min(names)}"
        )
    flag = "--deploy" if request.deploy else f"--model {model}" if model not in (None, file_weights.model) else None
    if flag is not None:
        raise UsageError(f"{flag}: {file_weights.path} is of {WORDS[file_weights.own]}; leave the flag out")
    _write(request, arrays, tell=tell, note=", with the names of the module's state_dict")


def _fit(file_weights: "Weights", target_model: "Expected", *, tell: Tell, warn: Tell) -> Mapping[str, "Array"]:
    """Return the file's arrays under the model's names and in its types; tell what does not fit.

    Counters that the file does not hold are 0.
    """
    import numpy as np

    from mtrain.weights.models import fit

    result = fit(file_weights, target_model)
    classes = f" with {target_model.classes} classes" if target_model.classes is not None else ""
    part = f", as its `{result.prefix.rstrip('.')}`" if result.prefix else ""
    tell(f"{target_model.model}{classes}: {len(result.matched)} of {len(target_model.state)} arrays taken{part}")
    if result.counters:
        tell(f"{len(result.counters)} counters that such files do not hold are 0")
    for sentence in result.warnings():
        warn(f"warning: {sentence}")
    zeros = {name: np.zeros(target_model.state[name].shape, target_model.state[name].dtype) for name in result.counters}
    arrays = {**result.matched, **zeros}
    return {name: arrays[name] for name in target_model.state if name in arrays}


def _fuse(arrays: Mapping[str, "Array"], target_model: "Expected", *, registry: "Registry") -> Mapping[str, "Array"]:
    """Return the state for inference, made by the model's own ``fused``."""
    from mtrain.core.interfaces import Model

    missing = [name for name in target_model.state if name not in arrays]
    model: type[Model] = registry.load("models", target_model.model)
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


def _describe(file_weights: "Weights") -> str:
    size = sum(array.nbytes for array in file_weights.arrays.values())
    types = ", ".join(sorted({str(array.dtype) for array in file_weights.arrays.values()}))
    return f"{file_weights.path}: {file_weights.description}: {len(file_weights.arrays)} arrays of {types}, {size / MIB:.1f} MiB"
