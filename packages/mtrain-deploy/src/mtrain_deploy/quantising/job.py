"""Turn an exported model into one whose layers compute with 8-bit integers, by ONNX Runtime's own quantiser."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs import beside_run
from mtrain.jobs.exported import SUFFIX, carried_spec
from mtrain.spec import outputs, remedies
from mtrain.spec.request import SpecRequest
from mtrain.system import plugin_packages
from mtrain_deploy.exported.metadata import Metadata
from mtrain_deploy.exported.model import read_metadata
from mtrain_deploy.exporting import job as exporting
from mtrain_deploy.exporting.request import ExportRequest
from mtrain_deploy.quantising import calibration, graph

Method: TypeAlias = Literal["minmax", "percentile"]
QUANTISED_OPS = ("Conv", "Gemm", "MatMul", "Sigmoid", "Mul", "Add", "Concat", "MaxPool", "Resize")
"""What computes with integers: the layers, and what stands between them, which would otherwise convert to floats and back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantiseRequest:
    """A request: the model to quantise, and the way."""

    weights: str | None = None
    """An exported model; None: the run is exported first."""
    run: str | None = None
    """A run folder, whose best checkpoint is exported; None: ``runs/latest`` if there are no ``weights``."""
    spec: SpecRequest = field(default_factory=SpecRequest)
    """The spec whose data calibrate; none named: that of the run, or the one in the exported model, which has no paths."""
    out: Path | None = None
    """File to write; None: the name of the exported model, or of the run, with ``-int8`` added, in the current folder."""
    samples: int = 64
    """Number of images of the training split from which ranges are measured."""
    seed: int = 0
    """Seed of their draw."""
    method: Method = "minmax"
    """How a range follows from values: the extremes, or without the largest 0.001 %."""
    force: bool = False
    """Replace a file that exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """The result."""

    code: int
    """Exit code; nothing was written where it is not 0."""
    path: Path | None = None
    layers: int = 0
    """Layers that compute with 8 bits."""
    float_layers: int = 0
    """Last layers, which stay in float."""
    trained: int = 0
    """Tensors whose range comes from ``train.quantise``."""
    measured: int = 0
    """Images from which the other ranges were measured."""


@store.holding()
def quantise(request: QuantiseRequest) -> Quantised:
    """Write an exported model with 8-bit weights and activations.

    Raises:
        UsageError: There is no such model, it is quantised already or of half precision, its data cannot be read, or a
            package is missing.
    """
    remedies.need(("onnx", "onnxruntime"), what="quantise", extra="mtrain-deploy")
    if request.weights is not None and request.run is not None:
        raise UsageError(f"--weights {request.weights} and --run {request.run} are both given; keep one")
    out = _target(request)
    with _scratch() as folder:
        source, config = None if request.weights is None else Path(request.weights), request.spec.config
        if source is None:
            if config is not None:
                beside_run.say(request.spec.read(config), Path(request.run or "runs/latest"))
            exported = _exported(request, folder)
            if exported.code != 0:
                return Quantised(code=exported.code)
            source = exported.files[0]
            config = config or exporting.config_of(request.run)
        metadata = read_metadata(source)
        _check_model(request.weights or str(request.run), metadata)
        config = carried_spec(metadata.spec, name=str(source)) if config is None else config
        job = request.spec.read(config).job
        plugin_packages.check(job)
        batches = calibration.samples(job, metadata, count=request.samples, seed=request.seed)
        feeds = list(calibration.feeds(batches, metadata))
        result = _written(source, metadata, feeds, method=request.method, out=out, folder=folder)
    return replace(result, path=out)


def _target(request: QuantiseRequest) -> Path:
    """Return the file to write.

    Raises:
        UsageError: It cannot or should not be written.
    """
    name = Path(request.weights).stem if request.weights else Path(request.run or "runs/latest").resolve().name
    out = request.out or Path(f"{name}-int8{SUFFIX}")
    if out.suffix != SUFFIX:
        raise UsageError(f"-o {out}: quantise writes {SUFFIX}; give a name that ends with it")
    if out.is_dir():
        raise UsageError(f"-o {out}: is a folder; give the name of a file")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"-o {out}: the folder {out.parent} does not exist; create it, or choose another name")
    if out.exists() and not request.force:
        raise UsageError(f"-o {out}: exists already; give --force to replace it, or another name")
    return out


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a folder for intermediate files, silence the quantiser's advice meanwhile, and remove the folder."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="mtrain-quantise-") as folder:
            yield Path(folder)
    finally:
        root.setLevel(level)


def _exported(request: QuantiseRequest, folder: Path) -> exporting.Exported:
    return exporting.export(
        ExportRequest(spec=replace(request.spec, config=None), run=request.run, out=folder / "float.onnx")
    )


def _check_model(name: str, metadata: Metadata) -> None:
    """Refuse a model that cannot be quantised.

    Raises:
        CheckpointError: It has 8 bits already, or half precision.
    """
    if metadata.precision == "int8":
        raise CheckpointError(f"{name}: is quantised already; give the file that it was made of")
    if metadata.precision != "fp32":
        raise CheckpointError(f"{name}: has precision {metadata.precision}; export it again with --precision fp32")


def _written(
    source: Path, metadata: Metadata, feeds: list[dict[str, Array]], *, method: Method, out: Path, folder: Path
) -> Quantised:
    """Quantise ``source`` into ``out`` with ranges measured on ``feeds``, those of training in their place."""
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands over one feed after the other, then None."""

        def __init__(self) -> None:
            self._feeds = iter(feeds)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._feeds, None)

    # Its method "entropy" is left out: quantize_static has no setting for the number of bins, and with its default the
    # ranges are those of the extremes.
    methods = {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile}
    prepared, made = folder / "prepared.onnx", folder / "int8.onnx"
    # The names of modules, by which layers find their trained ranges, are lost in the preparation.
    trained = graph.trained_tensors(onnx.load(str(source)).graph, metadata.ranges)
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    content = onnx.load(str(prepared)).graph
    floats = graph.left_in_float(content)
    kept = {layer.input for layer in graph.layers(content) if layer.node not in floats}
    trained = {name: bounds for name, bounds in trained.items() if name in kept}
    quantize_static(
        str(prepared),
        str(made),
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(QUANTISED_OPS),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=sorted(floats),
        calibrate_method=methods[method],
        extra_options={"TensorQuantOverrides": dict(graph.overrides(trained)), "CalibTensorRangeSymmetric": False},
    )
    model = onnx.load(str(made))
    from mtrain_deploy.exporting.onnx_file import write_metadata

    write_metadata(model, metadata.model_copy(update={"precision": "int8"}))
    model.producer_name, model.producer_version = "mtrain", metadata.mtrain
    with outputs.replaced_by(out) as new:
        onnx.save(model, str(new))
    layers, float_layers = graph.counted(content, floats)
    return Quantised(code=0, layers=layers, float_layers=float_layers, trained=len(trained), measured=len(feeds))
