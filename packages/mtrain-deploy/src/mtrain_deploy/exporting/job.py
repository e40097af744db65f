"""Export a trained model: one rank writes the program, and ONNX files get mtrain's metadata."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.checkpoint import store
from mtrain.core.record_files import write_json
from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs.exported import is_exported, spec_with
from mtrain.jobs.hosts.this_host import run_job
from mtrain.jobs.plan.solo import one_process
from mtrain.jobs.resume import compare, find, load
from mtrain.jobs.resume.fetch import TrainedWeights
from mtrain.spec import outputs, remedies
from mtrain.spec.disclosure import needed_to_evaluate, shorten
from mtrain.spec.files import parse_json
from mtrain.spec.references import is_reference
from mtrain.weights.described import Description
from mtrain.weights.names import COUNTER
from mtrain.weights.own import own_kind_of, refuse_own
from mtrain.weights.reading import asked_or_said
from mtrain_deploy.exported.metadata import SUPPRESSED
from mtrain_deploy.exporting import openvino_ir
from mtrain_deploy.exporting.paddle_detection import INFER_CONFIG, infer_config, write_yaml
from mtrain_deploy.exporting.rank import FACTS, REQUEST, program_of, whole_weights
from mtrain_deploy.exporting.request import ExportRequest, refuse_target
from mtrain_deploy.exporting.suppression import settings_of

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source

SUFFIXES: dict[str, str] = {
    "onnx": ".onnx",
    "openvino": ".xml",
    "torch": ".pt2",
    "paddle": "",
    "safetensors": ".safetensors",
}
"""Ending of each format's file. Paddle writes several files, which share the name."""
PADDLE_FILES = (".json", ".pdmodel", ".pdiparams")
"""Endings that Paddle adds; which of the first two depends on its version."""
FRAMEWORK_OF: dict[str, str] = {"onnx": "torch", "openvino": "torch", "torch": "torch", "paddle": "paddle"}
"""The framework that writes each format."""
GRAPHS = ("onnx", "openvino")
"""Formats of which a rank writes an ONNX graph, which is completed here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of an export."""

    code: int
    """Exit code; nothing was written where it is not 0."""
    files: tuple[Path, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was written, in plain values: ``outputs``, ``class_names``, ``image_size`` and more."""


@store.holding()
def export_weights(request: ExportRequest) -> Exported:
    """Write trained weights as a file for inference.

    Raises:
        UsageError: There are no weights, they do not fit the spec, or the model cannot be written in this form.
    """
    _check(request)
    # A run or checkpoint may be an address, whose files are copied here first.
    named = TrainedWeights(run=request.run, checkpoint=request.checkpoint, weights=request.weights).fetch()
    request = replace(request, run=named.run, checkpoint=named.checkpoint, weights=named.weights)
    weights, config = _weights_of(request)
    if request.spec.config is None:
        refuse_own(weights, "export: needs the spec that names your model and your data set, with -c")
    loaded = _on_one_rank(config, request)
    if request.spec.config is not None and own_kind_of(weights) != "script":  # that of a script names no model
        compare.say(request.spec.read(config), weights)
    if is_reference(loaded.spec.model.name):
        _check_own(request, request.spec.read(config))
    names: list[str] = []
    if not weights.is_dir() and not is_reference(loaded.spec.model.name):
        names = asked_or_said(weights, loaded.spec.data.names)
    out = request.out or Path(_name_of(weights) + SUFFIXES[request.format])
    _check_target(out, request)
    if request.format == "safetensors":
        return _arrays_written(loaded, weights, out, names=names)
    if not is_reference(loaded.spec.model.name):
        _check_model(loaded, weights, request, names=names)
    with _work_folder(out) as folder:
        is_graph = request.format in GRAPHS
        made = folder / f"program{SUFFIXES['onnx' if is_graph else request.format]}"
        write_json(folder / REQUEST, {**_rank_request(request, loaded, made, weights), "class_names": names})
        code = run_job(loaded, folder, weights.absolute(), mode="mtrain_deploy.exporting.rank", quiet=True).code
        if code != 0:
            return Exported(code=code)
        facts = parse_json((folder / FACTS).read_bytes())
        if is_graph:
            from mtrain_deploy.exporting.onnx_file import finish

            metadata = finish(made, request=request, facts=facts, loaded=loaded, weights=weights)
            facts = {**facts, "outputs": list(metadata.outputs)}
        if request.format == "openvino":
            made = openvino_ir.convert(made, made.with_suffix(".xml"), metadata)
        files = _move_files(made, out)
    if (request.format, request.form) == ("paddle", "nms"):
        config = infer_config(loaded, facts, dynamic_size=request.dynamic_size)
        files = (*files, write_yaml(out.with_name(INFER_CONFIG), config))
    return Exported(code=0, files=files, facts=facts)


def _check(request: ExportRequest) -> None:
    """Refuse a request whose parts contradict one another.

    Raises:
        UsageError: They do.
    """
    if request.form != "decoded" and request.format == "safetensors":
        raise UsageError(f"--form {request.form}: safetensors holds weights only; leave --form out")
    if (
        request.form in SUPPRESSED
        and request.format not in GRAPHS
        and (request.format, request.form) != ("paddle", "nms")
    ):
        raise UsageError(
            f"--form {request.form}: is for --format {' and '.join(GRAPHS)}; {request.format} programs have --form decoded or raw"
        )
    if request.suppression and request.form not in SUPPRESSED:
        raise UsageError(
            f"--{next(iter(request.suppression)).replace('_', '-')}: is for --form {' and '.join(SUPPRESSED)}"
        )
    for flag, given in (("--layout nchw", request.layout == "nchw"), ("--input float", request.input == "float")):
        if given and request.format == "safetensors":
            raise UsageError(f"{flag}: is for programs; safetensors holds weights only; leave the flag out")
    if request.precision == "fp16" and request.format in ("safetensors", "paddle"):
        raise UsageError(f"--precision fp16: is for --format onnx, openvino and torch, not for {request.format}")
    if request.dynamic_size and request.format == "safetensors":
        raise UsageError("--dynamic-size: is for programs; safetensors holds weights only; leave the flag out")
    if request.opset is not None and request.format not in GRAPHS:
        raise UsageError(f"--opset: is for --format {' and '.join(GRAPHS)}, not for {request.format}")
    if request.format == "openvino":
        openvino_ir.need_openvino()
    if request.format in GRAPHS:
        # The metadata are written here, whichever interpreter the rank has.
        remedies.require(("onnx",), what=f"--format {request.format}", extra="mtrain-deploy")


def _weights_of(request: ExportRequest) -> tuple[Path, "Source"]:
    """Return the checkpoint or file to export, and the spec that goes with it."""
    weights = find.find_weights("export", run=request.run, checkpoint=request.checkpoint, weights=request.weights)
    if is_exported(weights):
        raise UsageError(f"{weights}: is an exported model already; give a run, a checkpoint or a file of weights")
    if weights.is_dir() and not (weights / "weights.safetensors").exists():
        best = find.best_of(weights)
        if best is None:
            raise CheckpointError(f"export: no intact checkpoint in {weights}; give a run folder or a checkpoint")
        weights = best
    config = request.spec.config
    if config is None and request.weights and not weights.is_dir():
        config = load.find_spec(None, request.run) or spec_with(str(weights))
    elif config is None:
        config = load.find_spec(None, str(weights))
    return weights, config


def config_of(run: str | None) -> "Source":
    """Return the spec of a run, as an export of it uses it."""
    return _weights_of(ExportRequest(run=run))[1]


def _on_one_rank(config: "Source", request: ExportRequest) -> "Loaded":
    """Load the spec for one process on the CPU, on the framework that writes the format.

    An interpreter that the spec names is kept if the user names it now, or it is that of the same framework.
    """
    trained = request.spec.read(config)
    used = trained.job.backend.framework
    framework = FRAMEWORK_OF.get(request.format, used)
    typed = trained.origin("backend.python").kind in ("flag", "override", "env")
    values = one_process(framework, device="cpu") | {
        "train.batch_size": 1,
        "train.accumulate": 1,
        "train.precision": "fp32",
        # Fake rounding belongs to training; `mtrain quantise` rounds the exported file.
        "train.quantise": None,
    }
    # The interpreter that trained has another framework than the one that writes this format.
    if not typed and framework != used:
        values["backend.python"] = None
    return request.spec.read(config, values)


def _check_own(request: ExportRequest, trained: "Loaded") -> None:
    """Refuse what cannot be had of a user's own model.

    Raises:
        UsageError: It was asked for.
    """
    model = trained.spec.model
    is_paddle = trained.job.backend.framework == "paddle" or model.declared_framework == "paddle"
    if is_paddle and request.format != "paddle":
        raise UsageError(
            f"--format {request.format}: {shorten(model.name)} is a model of Paddle, which is exported with --format paddle"
        )
    asked = {
        f"--format {request.format}": request.format == "safetensors" or (request.format == "paddle" and not is_paddle),
        f"--form {request.form}": request.form != "decoded",
        f"--precision {request.precision}": request.precision != "fp32",
        "--dynamic-size": request.dynamic_size,
        "--layout nchw": request.layout != "nhwc",
        "--input float": request.input != "uint8",
    }
    kinds = "a program of Paddle" if is_paddle else "ONNX, OpenVINO or a program of torch.export"
    for flag, given in asked.items():
        if given:
            raise UsageError(
                f"{flag}: an own model of {'Paddle' if is_paddle else 'torch'} is exported as {kinds}, in fp32, with the outputs "
                "of its predict; leave the flag out"
            )


def _check_model(loaded: "Loaded", weights: Path, request: ExportRequest, *, names: Sequence[str]) -> None:
    """Refuse, before a rank is started, what the model cannot do, and weights that are not its own.

    Raises:
        UsageError: The request cannot be fulfilled.
    """
    plugin: Any = loaded.job.model
    program_of(loaded.job, plugin, _rank_request(request, loaded, Path("program"), weights))
    if request.form in SUPPRESSED:
        settings = settings_of({"options": plugin.options.model_dump()}, request.suppression)
        if request.format == "paddle" and settings["class_agnostic"]:
            raise UsageError(
                "--form nms: Paddle suppresses boxes by class; give -o model.options.class_agnostic=false, or --format onnx"
            )
    if not weights.is_dir():
        whole_weights(loaded.job, weights, classes=len(names))


def _rank_request(request: ExportRequest, loaded: "Loaded", made: Path, weights: Path) -> dict[str, Any]:
    for_paddle_detection = (request.format, request.form) == ("paddle", "nms")
    plugin: Any = loaded.job.model
    return {
        "format": "onnx" if request.format in GRAPHS else request.format,
        "path": str(made.absolute()),
        "raw": request.form == "raw",
        "half": request.precision == "fp16",
        "batch": request.batch,
        "dynamic_size": request.dynamic_size,
        "opset": request.opset,
        "channels_first": request.layout == "nchw" or for_paddle_detection,
        "floats": request.input == "float" or for_paddle_detection,
        "suppression": settings_of({"options": plugin.options.model_dump()}, request.suppression)
        if for_paddle_detection
        else {},
        "own": own_kind_of(weights),
    }


def _name_of(weights: Path) -> str:
    """Return a name for what is exported: that of the run, or of the file."""
    if not weights.is_dir():
        return weights.stem
    return (weights.parent.parent if weights.parent.name == "checkpoints" else weights).name


def _check_target(out: Path, request: ExportRequest) -> None:
    """Refuse a file that cannot or should not be written, before any work is done.

    Raises:
        UsageError: It exists already, or has another format's ending, or its folder does not exist.
    """
    suffix = SUFFIXES[request.format]
    paths = [out.with_name(out.name + ending) for ending in PADDLE_FILES] if not suffix else [out]
    if (request.format, request.form) == ("paddle", "nms"):
        paths.append(out.with_name(INFER_CONFIG))
    if request.format == "openvino":
        paths.append(out.with_suffix(openvino_ir.WEIGHTS_SUFFIX))
    refuse_target(out, paths, suffix=suffix, writer=f"--format {request.format}", force=request.force)


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """Make a folder beside the target, in which the rank works; it stays if the rank fails, for its logs."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.stem}-", dir=out.absolute().parent))
    except OSError as error:
        raise UsageError(f"-o {out}: cannot be written: {error.strerror or error}") from error
    yield folder
    if not (folder / "failures").is_dir() or not any((folder / "failures").iterdir()):
        shutil.rmtree(folder, ignore_errors=True)


def _move_files(made: Path, out: Path) -> tuple[Path, ...]:
    """Move the files that were made to their place."""
    targets = {
        path: out.with_name(out.name + path.name.removeprefix(made.name)) for path in made.parent.glob(f"{made.name}*")
    }
    if made.suffix == SUFFIXES["openvino"]:
        targets[made.with_suffix(openvino_ir.WEIGHTS_SUFFIX)] = out.with_suffix(openvino_ir.WEIGHTS_SUFFIX)
    return tuple(path.replace(targets[path]) for path in sorted(targets))


def _arrays_written(loaded: "Loaded", weights: Path, out: Path, *, names: Sequence[str]) -> Exported:
    """Write the neutral weights, with their classes and model in the header; this needs no framework and no rank."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    labels = {"class_names": names, **(store.load(weights).meta["extra"] if weights.is_dir() else {})}
    description = Description(
        class_names=tuple(labels["class_names"]),
        category_ids=tuple(labels.get("category_ids") or ()),
        spec=needed_to_evaluate(loaded.spec),
    )
    state = whole_weights(loaded.job, weights, classes=len(description.class_names))
    # Nothing that infers reads BatchNorm's counters of batches.
    arrays = {name: array.copy() for name, array in state.items() if name.rpartition(".")[2] != COUNTER}
    try:
        with outputs.replaced_by(out) as new:
            save_file(arrays, new, metadata=description.entries())
    except (OSError, SafetensorError) as error:  # the library has no OSError for a full disk
        raise UsageError(f"-o {out}: cannot be written: {error}") from error
    facts = {"outputs": [], "class_names": list(description.class_names), "arrays": len(arrays)}
    return Exported(code=0, files=(out,), facts=facts)
