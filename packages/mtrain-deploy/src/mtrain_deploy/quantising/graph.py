"""The layers of an exported model: which of them compute with 8 bits, and which tensors have trained ranges."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain.core.network.quantising import INPUT_LEVELS

LAYER_KINDS = ("Conv", "Gemm", "MatMul")
WEIGHT = ".weight"
SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch's exporter writes the modules that a node belongs to."""
PREFIX = "network."
"""Name of the model inside the module that was exported."""
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One convolution or matrix product with a weight."""

    node: str
    name: str
    """Name of the layer in the neutral model, such as ``backbone.0.conv``."""
    input: str
    """Name of the tensor that it reads."""


def layers(graph: Any) -> list[Layer]:
    """Return the layers of an ``onnx.GraphProto`` that have a trained weight, in its order."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    return [
        Layer(node=node.name, name=_name(node), input=node.input[0])
        for node in graph.node
        if node.op_type in LAYER_KINDS and node.input[1] in weights and _is_trained(weights[node.input[1]])
    ]


def _is_trained(weight: Any) -> bool:
    """Return whether a constant is a weight, and not such as the vector that turns a distribution into a distance."""
    return bool(weight.name.endswith(WEIGHT)) or sum(side > 1 for side in weight.dims) > 1


def _name(node: Any) -> str:
    if node.input[1].endswith(WEIGHT):
        return str(node.input[1].removesuffix(WEIGHT).removeprefix(PREFIX))
    scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
    names = [name for name in ast.literal_eval(scopes) if "." in name]
    return str(names[-1].removeprefix(PREFIX)) if names else str(node.name)


def left_in_float(graph: Any) -> set[str]:
    """Return the names of the nodes that keep computing with floats.

    They are the last layers, everything after them (decoding of boxes, suppression, softmax), whose values are the result
    itself, and matrix products of two computed tensors (attention).
    """
    trained = {layer.node for layer in layers(graph)}
    reads = [(node, set(node.input)) for node in graph.node]
    before_a_layer: set[str] = set()
    # From the outputs backwards: what no trained layer reads, directly or through others, is float.
    for node, inputs in reversed(reads):
        outputs = set(node.output)
        if outputs & before_a_layer or node.name in trained:
            before_a_layer |= inputs
    floats = {node.name for node, _ in reads if not set(node.output) & before_a_layer}
    products = {node.name for node, _ in reads if node.op_type in LAYER_KINDS and node.name not in trained}
    return floats | products


def trained_tensors(graph: Any, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return the trained range of each tensor that a layer with one reads, by the tensor's name."""
    return {layer.input: found for layer in layers(graph) if (found := _range_of(layer.name, ranges)) is not None}


def _range_of(name: str, ranges: Mapping[str, Range]) -> Range | None:
    if name in ranges:
        return ranges[name]
    parent = name.rpartition(".")[0]
    # A layer that was merged of several, as in a re-parameterised network, has the range that all of them share.
    parts = {found for other, found in ranges.items() if parent and other.startswith(f"{parent}.")}
    return parts.pop() if len(parts) == 1 else None


def overrides(tensors: Mapping[str, Range]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the settings of ONNX Runtime's quantiser that give each tensor the scale and zero point of its training."""
    for name, bounds in tensors.items():
        smallest, largest = np.asarray(bounds, np.float32)
        scale = np.float32((largest - smallest) / np.float32(INPUT_LEVELS))
        zero_point = np.round(-smallest / scale).astype(np.uint8)
        yield name, [{"scale": np.asarray(scale), "zero_point": np.asarray(zero_point)}]


def count_layers(graph: Any, excluded: Iterable[str]) -> tuple[int, int]:
    """Return (layers with 8 bits, layers in float) of a graph."""
    excluded = set(excluded)
    nodes = [layer.node for layer in layers(graph)]
    floats = sum(node in excluded for node in nodes)
    return len(nodes) - floats, floats
