"""Suppression inside an ONNX graph selects what ``models.common.nms`` selects in numpy."""

import numpy as np
import pytest

from mtrain.models.common.nms import Selection, detections, detections_by_class
from mtrain_deploy.exported.metadata import COUNTS, DETECTIONS
from mtrain_deploy.exporting.onnx_file import _name_axes, _shape
from mtrain_deploy.exporting.suppression import add_suppression

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def run(outputs: dict[str, np.ndarray], settings: dict[str, object]) -> np.ndarray:
    """Return the rows of a graph whose outputs before suppression are its inputs."""
    return computed(outputs, settings, fixed=False)[DETECTIONS]


def computed(outputs: dict[str, np.ndarray], settings: dict[str, object], *, fixed: bool) -> dict[str, np.ndarray]:
    from onnx import TensorProto, helper

    def described(name: str, values: np.ndarray) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *values.shape[1:]])

    nodes = [helper.make_node("Identity", [f"in_{name}"], [name]) for name in outputs]
    graph = helper.make_graph(
        nodes, "g", [described(f"in_{n}", v) for n, v in outputs.items()], [described(n, v) for n, v in outputs.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    add_suppression(model, settings, fixed=fixed)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {f"in_{name}": x for name, x in outputs.items()}), strict=True))


def decoded(rng: np.random.Generator, *, classes: int, images: int = 3, boxes: int = 120) -> np.ndarray:
    """Rows ``[xc, yc, w, h, objectness, scores...]`` in clusters, so that many boxes overlap."""
    centres = rng.uniform(20, 80, (images, 6, 2))[:, rng.integers(0, 6, boxes)] + rng.normal(0, 3, (images, boxes, 2))
    sides = rng.uniform(10, 30, (images, boxes, 2))
    return np.concatenate((centres, sides, rng.uniform(0, 1, (images, boxes, 1 + classes))), axis=2).astype(np.float32)


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("class_agnostic", [True, False])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("limit", [300, 7])
def test_decoded_rows(multi_label, class_agnostic, classes, limit):
    settings = {"confidence": 0.2, "iou_threshold": 0.5, "max_detections": limit}
    settings |= {"multi_label": multi_label, "class_agnostic": class_agnostic}
    values = decoded(np.random.default_rng(classes), classes=classes)
    rows = run({"decoded": values}, settings)
    selection = Selection(**settings)
    for image, own in enumerate(values):
        expected = detections(own, selection)
        assert len(expected) == limit or limit == 300
        np.testing.assert_allclose(rows[rows[:, 0] == image, 1:], expected, rtol=1e-6, atol=1e-5)


def test_boxes_with_scores():
    settings = {
        "confidence": 0.3,
        "iou_threshold": 0.6,
        "max_detections": 20,
        "multi_label": True,
        "class_agnostic": False,
    }
    values = decoded(np.random.default_rng(3), classes=5)
    half = values[..., 2:4] / 2
    boxes, scores = np.concatenate((values[..., :2] - half, values[..., :2] + half), axis=2), values[..., 5:]
    rows = run({"boxes": boxes, "scores": scores}, settings)
    for image in range(len(values)):
        expected = detections_by_class(
            boxes[image], scores[image], confidence=0.3, iou_threshold=0.6, max_candidates=1000, max_detections=20
        )
        np.testing.assert_allclose(rows[rows[:, 0] == image, 1:], expected, rtol=1e-6, atol=1e-5)


def test_images_without_a_candidate_have_no_rows():
    settings = {
        "confidence": 0.99999,
        "iou_threshold": 0.5,
        "max_detections": 10,
        "multi_label": True,
        "class_agnostic": False,
    }
    values = decoded(np.random.default_rng(0), classes=2)
    values[..., 4] = 0.5
    assert run({"decoded": values}, settings).shape == (0, 7)


def test_free_axes_are_named_after_the_image_and_other_ones_after_their_output():
    """The exporter names them after what they are multiples of."""
    symbols = [("images", ("s0", 3, "32*s1", "32*s2")), ("decoded", ("s0", "63*s1*s2", 15)), ("mask", ("s0", "32*s1"))]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in symbols]
    inner = onnx.helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, ("s0", "2*s1"))
    model = onnx.helper.make_model(onnx.helper.make_graph([], "x", values[:1], values[1:], value_info=[inner]))
    _name_axes(model, [{"name": "images", "axes": {"0": "batch", "2": "height", "3": "width"}}])
    found = [_shape(value) for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]]
    assert found == [("batch", 3, "height", "width"), ("batch", "decoded_1", 15), ("batch", "height")]


@pytest.mark.parametrize("class_agnostic", [False, True])
def test_lists_of_fixed_length_hold_the_detections_of_each_image(class_agnostic):
    settings = {"confidence": 0.2, "iou_threshold": 0.5, "max_detections": 7}
    settings |= {"multi_label": True, "class_agnostic": class_agnostic}
    values = decoded(np.random.default_rng(0), classes=3)
    values[1, :, 4] = 0  # an image without an object
    values[2, 2:, 4] = 0  # and one with few
    outputs = computed({"decoded": values}, settings, fixed=True)
    lists, counts = outputs[DETECTIONS], outputs[COUNTS]
    assert lists.shape == (3, 7, 6)
    for image, own in enumerate(values):
        expected = detections(own, Selection(**settings))
        assert counts[image] == len(expected)
        np.testing.assert_allclose(lists[image, : counts[image]], expected, rtol=1e-6, atol=1e-5)
        assert not lists[image, counts[image] :].any()
    assert counts[0] == 7, "the limit is reached"
    assert counts[1] == 0
    assert 0 < counts[2] < 7


def test_an_empty_batch_has_no_detections():
    settings = {"confidence": 0.2, "iou_threshold": 0.5, "max_detections": 4}
    settings |= {"multi_label": True, "class_agnostic": False}
    outputs = {"decoded": decoded(np.random.default_rng(0), classes=2)[:0]}
    lists = computed(outputs, settings, fixed=True)
    assert (lists[DETECTIONS].shape, lists[COUNTS].shape) == ((0, 4, 6), (0,))
    assert run(outputs, settings).shape == (0, 7)
