"""Suppression of overlapping boxes inside an ONNX graph, with ONNX's own operator ``NonMaxSuppression``.

It selects what ``models.common.nms`` selects in numpy, but for images with more candidates than a model's
``max_candidates``, of which the graph considers all. Shape letters: B images, N boxes of an image, C classes, K detections.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import SpecError
from mtrain_deploy.exported.metadata import COUNTS, DETECTIONS

_PREFIX = "suppression_"
"""Begin of the names of all nodes and values that are added."""
SETTINGS = ("confidence", "iou_threshold", "max_detections")


def settings_of(facts: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the suppression: the model's options, replaced by those that were given.

    Raises:
        SpecError: The model has no such options, because it finds no boxes.
    """
    options = facts["options"]
    if missing := [name for name in SETTINGS if name not in options]:
        raise SpecError(f"--form nms: the model has no option {missing[0]}, so it finds no boxes; use --form decoded")
    own = {name: options[name] for name in SETTINGS}
    flags = {name: options.get(name, default) for name, default in (("multi_label", True), ("class_agnostic", False))}
    return {**own, **flags, **given}


def add_suppression(model: Any, settings: Mapping[str, Any], *, fixed: bool = False) -> None:
    """Replace the outputs of a detector's graph by ``detections``, see ``exported.metadata.DETECTIONS``.

    Args:
        model: ``onnx.ModelProto`` with the output ``decoded`` (B, N, 5 + C), rows ``[xc, yc, w, h, objectness, scores of
            classes]``, or ``boxes`` (B, N, 4), ``[x1, y1, x2, y2]``, and ``scores`` (B, N, C).
        settings: see ``settings_of``.
        fixed: Whether each image has a list of the same length, with a second output ``counts``.

    Raises:
        SpecError: The outputs are others.
    """
    from onnx import TensorProto, helper

    nodes = _Nodes(model.graph)
    names = [output.name for output in model.graph.output]
    if names == ["decoded"]:
        boxes_BN4, scores_BNC = _boxes_and_scores(nodes, "decoded")
    elif sorted(names) == ["boxes", "scores"]:
        boxes_BN4, scores_BNC = "boxes", "scores"
    else:
        raise SpecError(f"--form nms: the outputs are {', '.join(names)}; expected decoded, or boxes and scores")
    if not settings["multi_label"]:
        scores_BNC = _best_class_only(nodes, scores_BNC)
    batch = model.graph.output[0].type.tensor_type.shape.dim[0]
    rows_K7, ranks_K = _rows(nodes, boxes_BN4, scores_BNC, settings)
    del model.graph.output[:]
    if not fixed:
        nodes.add("Identity", [rows_K7], output=DETECTIONS)
        model.graph.output.append(helper.make_tensor_value_info(DETECTIONS, TensorProto.FLOAT, ["detections", 7]))
        return
    _lists(nodes, rows_K7, ranks_K, boxes_BN4, length=settings["max_detections"])
    size = batch.dim_param or batch.dim_value
    shape = [size, settings["max_detections"], 6]
    model.graph.output.append(helper.make_tensor_value_info(DETECTIONS, TensorProto.FLOAT, shape))
    model.graph.output.append(helper.make_tensor_value_info(COUNTS, TensorProto.INT64, [size]))


class _Nodes:
    """Adds nodes and constants to a graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._count = 0

    def constant(self, value: Any, dtype: str) -> str:
        """Add a constant array; return its name."""
        from onnx import numpy_helper

        self._count += 1
        name = f"{_PREFIX}constant_{self._count}"
        array: Array = np.asarray(value, dtype)
        self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def add(self, operator: str, inputs: Sequence[str], *, output: str = "", count: int = 1, **attributes: Any) -> str:
        """Add a node; return the name of its last output."""
        from onnx import helper

        self._count += 1
        name = f"{_PREFIX}{operator.lower()}_{self._count}"
        outputs = [output or f"{name}_{i}" for i in range(count)]
        self._graph.node.append(helper.make_node(operator, list(inputs), outputs, name=name, **attributes))
        return outputs[-1]

    def span(self, x: str, start: int, stop: int, *, axis: int) -> str:
        """Add a slice of one axis."""
        bounds = [self.constant([value], "int64") for value in (start, stop, axis)]
        return self.add("Slice", [x, *bounds])

    def column(self, x_K3: str, index: int) -> str:
        """Add a column (K,) of a matrix."""
        return self.add("Gather", [x_K3, self.constant(index, "int64")], axis=1)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Add a reshape; 0 keeps an axis, -1 is what is left."""
        return self.add("Reshape", [x, self.constant(shape, "int64")])


def _boxes_and_scores(nodes: _Nodes, decoded_BND: str) -> tuple[str, str]:
    """Add the corners of boxes, and scores as products of objectness and class score."""
    half_BN2 = nodes.add("Mul", [nodes.span(decoded_BND, 2, 4, axis=2), nodes.constant(0.5, "float32")])
    centre_BN2 = nodes.span(decoded_BND, 0, 2, axis=2)
    corners = [nodes.add(operator, [centre_BN2, half_BN2]) for operator in ("Sub", "Add")]
    scores_BNC = nodes.span(decoded_BND, 5, np.iinfo(np.int64).max, axis=2)
    scores_BNC = nodes.add("Mul", [scores_BNC, nodes.span(decoded_BND, 4, 5, axis=2)])
    return nodes.add("Concat", corners, axis=2), scores_BNC


def _best_class_only(nodes: _Nodes, scores_BNC: str) -> str:
    """Add scores of which only the best one of each box is left; the others are 0."""
    best_BN = nodes.add("ArgMax", [scores_BNC], axis=2, keepdims=0)
    count = nodes.span(nodes.add("Shape", [scores_BNC]), 2, 3, axis=0)
    chosen_BNC = nodes.add("OneHot", [best_BN, count, nodes.constant([0, 1], "float32")], axis=-1)
    return nodes.add("Mul", [scores_BNC, chosen_BNC])


def _rows(nodes: _Nodes, boxes_BN4: str, scores_BNC: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Add suppression, the rows (K, 7) that are left, best first, and the rank of each in its image, from 1."""
    class_count = nodes.span(nodes.add("Shape", [scores_BNC]), 2, 3, axis=0)
    if settings["class_agnostic"]:  # each pair of box and class becomes a box of one common class
        scores_B1M = nodes.reshape(scores_BNC, [0, 1, -1])
        boxes_BN14 = nodes.add("Unsqueeze", [boxes_BN4, nodes.constant([2], "int64")])
        ones = nodes.constant([1], "int64")
        repeats = nodes.add("Concat", [ones, ones, class_count, ones], axis=0)
        boxes_BM4 = nodes.reshape(nodes.add("Expand", [boxes_BN14, repeats]), [0, -1, 4])
    else:
        scores_B1M, boxes_BM4 = nodes.add("Transpose", [scores_BNC], perm=[0, 2, 1]), boxes_BN4
    limits = [
        nodes.constant([settings["max_detections"]], "int64"),
        nodes.constant([settings["iou_threshold"]], "float32"),
        nodes.constant([settings["confidence"]], "float32"),
    ]
    selected_K3 = nodes.add("NonMaxSuppression", [boxes_BM4, scores_B1M, *limits])
    scores_K = nodes.add("GatherND", [scores_B1M, selected_K3])
    order_K = nodes.add("TopK", [scores_K, nodes.add("Shape", [scores_K])], count=2, axis=0)
    selected_K3 = nodes.add("Gather", [selected_K3, order_K], axis=0)
    images_K, classes_K, places_K = (nodes.column(selected_K3, index) for index in range(3))
    if settings["class_agnostic"]:
        classes_K = nodes.add("Mod", [places_K, class_count])
    place_K2 = nodes.add("Gather", [selected_K3, nodes.constant([0, 2], "int64")], axis=1)
    columns = [
        nodes.reshape(nodes.add("Cast", [images_K], to=1), [-1, 1]),
        nodes.add("GatherND", [boxes_BM4, place_K2]),
        nodes.reshape(nodes.add("Gather", [scores_K, order_K], axis=0), [-1, 1]),
        nodes.reshape(nodes.add("Cast", [classes_K], to=1), [-1, 1]),
    ]
    ranks_K = _ranks(nodes, images_K, boxes_BM4)
    kept_K = nodes.add("LessOrEqual", [ranks_K, nodes.constant(settings["max_detections"], "int64")])
    rows_K7 = nodes.add("Compress", [nodes.add("Concat", columns, axis=1), kept_K], axis=0)
    return rows_K7, nodes.add("Compress", [ranks_K, kept_K], axis=0)


def _ranks(nodes: _Nodes, images_K: str, boxes_BN4: str) -> str:
    """Add int64 (K,): the place of each row among those of its image, from 1."""
    of_image_KB = nodes.add("OneHot", [images_K, _depth(nodes, boxes_BN4), nodes.constant([0, 1], "int64")], axis=-1)
    ranks_KB = nodes.add("CumSum", [of_image_KB, nodes.constant(0, "int64")])
    ranks_KB = nodes.add("Mul", [ranks_KB, of_image_KB])
    return nodes.add("ReduceSum", [ranks_KB, nodes.constant([1], "int64")], keepdims=0)


def _depth(nodes: _Nodes, boxes_BN4: str) -> str:
    """Add int64 (1,): the number of images, or 1 where there is none, for which ``OneHot`` is not defined."""
    count_1 = nodes.span(nodes.add("Shape", [boxes_BN4]), 0, 1, axis=0)
    return nodes.add("Max", [count_1, nodes.constant([1], "int64")])


def _lists(nodes: _Nodes, rows_K7: str, ranks_K: str, boxes_BN4: str, *, length: int) -> None:
    """Add the outputs of form ``nms-fixed``: the rows of each image in a list of ``length``, and their number."""
    images_K = nodes.add("Cast", [nodes.column(rows_K7, 0)], to=7)
    places_K = nodes.add("Sub", [ranks_K, nodes.constant(1, "int64")])
    last_1 = nodes.constant([1], "int64")
    places_K2 = nodes.add(
        "Concat", [nodes.add("Unsqueeze", [column, last_1]) for column in (images_K, places_K)], axis=1
    )
    count_1 = nodes.span(nodes.add("Shape", [boxes_BN4]), 0, 1, axis=0)
    lists_BN6 = nodes.constant(0.0, "float32")
    shape_3 = nodes.add("Concat", [count_1, nodes.constant([length, 6], "int64")], axis=0)
    lists_BN6 = nodes.add("Expand", [lists_BN6, shape_3])
    nodes.add("ScatterND", [lists_BN6, places_K2, nodes.span(rows_K7, 1, 7, axis=1)], output=DETECTIONS)
    zeros_B = nodes.add("Expand", [nodes.constant(0, "int64"), count_1])
    ones_K = nodes.add("Expand", [last_1, nodes.add("Shape", [images_K])])
    images_K1 = nodes.add("Unsqueeze", [images_K, last_1])
    nodes.add("ScatterND", [zeros_B, images_K1, ones_K], output=COUNTS, reduction="add")
