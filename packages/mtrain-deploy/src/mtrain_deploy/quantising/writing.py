"""Quantise an exported model by ONNX Runtime's own quantiser."""

from collections.abc import Mapping
from pathlib import Path

from mtrain.core.interfaces import Array
from mtrain.spec import outputs
from mtrain_deploy.exported.metadata import Metadata
from mtrain_deploy.exporting.onnx_file import write_metadata
from mtrain_deploy.quantising import Method, graph

# What stands between the layers is among them: it would convert to floats and back.
QUANTISED_OPS = ("Conv", "Gemm", "MatMul", "Sigmoid", "Mul", "Add", "Concat", "MaxPool", "Resize")
"""What computes with integers."""


def write_quantised(
    source: Path, metadata: Metadata, feeds: list[dict[str, Array]], *, method: Method, out: Path, folder: Path
) -> Mapping[str, int]:
    """Quantise ``source`` into ``out`` with ranges measured on ``feeds``, those of training in their place.

    Returns:
        The numbers of ``layers`` with 8 bits, of ``float_layers``, and of ``trained`` ranges.
    """
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
    write_metadata(model, metadata.model_copy(update={"precision": "int8"}))
    model.producer_name, model.producer_version = "mtrain", metadata.mtrain
    with outputs.replaced_by(out) as new:
        onnx.save(model, str(new))
    layers, float_layers = graph.count_layers(content, floats)
    return {"layers": layers, "float_layers": float_layers, "trained": len(trained)}
