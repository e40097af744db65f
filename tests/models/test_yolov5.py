"""The YOLOv5 plugin: options, anchors, start values, what its network promises around the numbers."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from mtrain.core import ops
from mtrain.errors import SpecError
from mtrain.models.yolov5.model import COCO_ANCHORS, YOLOv5n, YOLOv5Options
from tests.models.sgd import Descent, arrays
from tests.models.yolov5_small import TASK, batch_of, ready_network, shapes_of
from tests.selection import under_torch

pytestmark = pytest.mark.smoke


def gradients(framework, network, loss):
    return framework.gradients(loss, list(framework.parameters(network).values()))


@pytest.mark.job
@under_torch
def test_the_plugin_needs_no_framework_until_it_builds():
    code = (
        "import sys, numpy as np\n"
        "from mtrain.models.yolov5.model import YOLOv5n\nfrom mtrain.core.interfaces import Task\n"
        "plugin = YOLOv5n(YOLOv5n.Options())\n"
        "task = Task(kind='detection', class_names=('a',), image_size=64, global_batch=2)\n"
        "task = plugin.prepare_task(task, {'boxes_wh_px': np.ones((3, 2)) * 20})\n"
        "plugin.initial({'model.0.conv.weight': (16, 3, 6, 6)}, task, seed=0)\n"
        "plugin.predictions({'decoded': np.zeros((1, 4, 6), np.float32)}, {})\n"
        "assert not {'torch', 'paddle'} & set(sys.modules)\n"
        "try: plugin.build(task)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "UnboundError nn.Module: no framework bound: load a backend first"


@pytest.mark.parametrize(
    "options", [{"boxx": 1}, {"label_smoothing": 1.5}, {"anchors": [[[1, 2]]]}, {"anchors": "best"}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        YOLOv5Options(**options)


def test_anchors_that_shrink_from_level_to_level_are_refused():
    with pytest.raises(ValidationError, match="smallest level first"):
        YOLOv5Options(anchors=COCO_ANCHORS[::-1])


def test_an_image_size_that_strides_do_not_divide_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match=r"image_size: 330 is not a multiple of 32 .* use 320"):
        YOLOv5n().prepare_task(replace(TASK, image_size=330), {})


def test_class_names_that_disagree_with_the_data_are_refused():
    with pytest.raises(SpecError, match=r"3 class names \(a, b, c\), 5 classes in the annotations"):
        YOLOv5n().prepare_task(TASK, {"class_count": 5})


def test_anchors_that_fit_are_kept():
    rng = np.random.default_rng(0)
    boxes = np.asarray(COCO_ANCHORS).reshape(-1, 2)[rng.integers(0, 9, 200)] * rng.uniform(0.8, 1.2, (200, 2))
    details = YOLOv5n().prepare_task(TASK, {"boxes_wh_px": boxes}).details
    assert details["anchors"] == np.asarray(COCO_ANCHORS).tolist()
    assert details["anchor_report"]["changed"] is False


def test_anchors_that_do_not_fit_are_recomputed_the_same_way_each_time():
    boxes = np.random.default_rng(1).uniform(2.1, 4.0, (300, 2)) * (1.0, 12.0)
    first, second = (YOLOv5n().prepare_task(TASK, {"boxes_wh_px": boxes}).details for _ in range(2))
    report = first["anchor_report"]
    assert report["changed"]
    assert report["recall_before"] < 0.98 < report["recall_after"]
    areas = np.prod(first["anchors"], axis=2).reshape(-1)
    assert (np.diff(areas) >= 0).all()
    assert first == second
    anchors = YOLOv5n().build(replace(TASK, details=first)).model[24].anchors
    np.testing.assert_allclose(ops.to_numpy(anchors)[0], np.asarray(first["anchors"])[0] / 8, rtol=1e-6)


def test_too_few_boxes_keep_the_anchors_and_say_so():
    report = YOLOv5n().prepare_task(TASK, {"boxes_wh_px": np.full((3, 2), 2.5)}).details["anchor_report"]
    assert not report["changed"]
    assert "3 boxes of at least 2 px, 9 are needed" in report["reason"]


def test_given_anchors_are_used_as_they_are():
    arguments = [[[2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13]], [[14, 15], [16, 17], [18, 19]]]
    plugin = YOLOv5n(YOLOv5Options(anchors=arguments))
    task = plugin.prepare_task(TASK, {"boxes_wh_px": np.full((50, 2), 500.0)})
    assert task.details["anchors"] == arguments
    assert task.details["anchor_report"]["recall_before"] == 0


def test_start_values_depend_on_seed_and_name_alone(framework):
    network = YOLOv5n().build(TASK)
    shapes = shapes_of(framework, network)
    first = YOLOv5n().initial(shapes, TASK, seed=3)
    backwards = YOLOv5n().initial(dict(reversed(list(shapes.items()))), TASK, seed=3)
    other = YOLOv5n().initial(shapes, TASK, seed=4)
    assert all(np.array_equal(first[name], backwards[name]) for name in shapes)
    assert not np.array_equal(first["model.0.conv.weight"], other["model.0.conv.weight"])
    assert {name: value.shape for name, value in first.items()} == shapes
    dtypes = {name: ops.dtype(x) for name, x in framework.state(network).items()}
    assert {name: str(value.dtype) for name, value in first.items()} == dtypes


@pytest.mark.parametrize("classes", [80, 3])
def test_start_values_are_uniform_with_the_head_at_the_expected_rates(golden, classes):
    task = golden.task(classes, 64)
    shapes = shapes_of(golden.framework, YOLOv5n().build(task))
    values = YOLOv5n().initial(shapes, task, seed=0)
    facts = golden.facts["yolov5n"][f"nc{classes}"]["init_bias_delta"]
    for level, stride in enumerate((8, 16, 32)):
        weight, bias = values[f"model.24.m.{level}.weight"], values[f"model.24.m.{level}.bias"].reshape(3, -1)
        bound = 1 / math.sqrt(weight.shape[1])
        assert 0.98 * bound < np.abs(weight).max() <= bound
        assert np.abs(bias[:, :4]).max() <= bound
        assert np.abs(bias[:, 4] - facts["obj_per_level"][level]).max() <= bound
        assert np.abs(bias[:, 5:] - facts["cls"]).max() <= bound * (1 + 1e-6)
        np.testing.assert_array_equal(values["model.24.anchors"][level] * stride, COCO_ANCHORS[level])
    assert (values["model.0.bn.weight"] == 1).all()
    assert (values["model.0.bn.running_var"] == 1).all()
    assert not values["model.0.bn.bias"].any()


def test_only_the_total_carries_a_gradient(framework):
    network = ready_network(framework)
    losses = network(batch_of(framework))
    alone = gradients(framework, network, losses["total"] * 1)
    assert any(gradient.any() for gradient in alone)
    losses = network(batch_of(framework))
    together = gradients(framework, network, losses["total"] + 5 * (losses["box"] + losses["obj"] + losses["cls"]))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    parts = sum(float(ops.to_numpy(losses[name])) for name in ("box", "obj", "cls"))
    assert float(ops.to_numpy(losses["total"])) == pytest.approx(2 * parts)


def test_without_boxes_every_parameter_still_gets_a_finite_gradient(framework):
    network = ready_network(framework)
    losses = network({**batch_of(framework), "targets": framework.tensor(np.zeros((0, 6), np.float32))})
    assert ops.to_numpy(losses["box"]) == 0
    assert ops.to_numpy(losses["cls"]) == 0
    actual = gradients(framework, network, losses["total"])
    assert all(np.isfinite(gradient).all() for gradient in actual)
    assert all(gradient.any() for gradient in actual)


def test_cells_that_match_nothing_cannot_spoil_the_gradient(framework):
    network = ready_network(framework)
    heads = [np.zeros((1, 24, size, size), np.float32) for size in (8, 4, 2)]
    heads[0][0, :8] = -300.0  # the anchor that does not match: sizes that underflow to 0, angles of nan
    heads = [framework.variable(head) for head in heads]
    target = framework.tensor(np.asarray([[0, 1, 0.06, 0.06, 0.9, 0.9]], np.float32))
    actual = framework.gradients(network.loss(heads, target)["total"], heads)
    assert all(np.isfinite(gradient).all() for gradient in actual)


def test_one_class_has_no_class_loss(framework):
    network = ready_network(framework, replace(TASK, class_names=("cell",)))
    batch = batch_of(framework, classes=1)
    losses = network(batch)
    assert all(np.isfinite(gradient).all() for gradient in gradients(framework, network, losses["total"]))
    assert ops.to_numpy(losses["cls"]) == 0
    network.eval()
    assert ops.shape(network(batch)["decoded"]) == (2, 252, 6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_images_reach_the_first_layer_as_shares_of_255(framework, dtype):
    network, batch = framework.to(ready_network(framework), dtype), batch_of(framework)
    records, first = [], network.model[0].forward
    network.model[0].forward = lambda x: (records.append(x), first(x))[1]
    network(batch)
    expected = ops.to_numpy(batch["images"]).transpose(0, 3, 1, 2).astype(dtype) / np.array(255, dtype)
    np.testing.assert_array_equal(ops.to_numpy(records[0]), expected, strict=True)


def test_images_need_not_be_square(framework):
    network = ready_network(framework)
    batch = {**batch_of(framework), "images": framework.tensor(np.zeros((2, 64, 128, 3), np.uint8))}
    assert np.isfinite(ops.to_numpy(network(batch)["total"]))
    network.eval()
    assert ops.shape(network(batch)["decoded"]) == (2, 3 * (8 * 16 + 4 * 8 + 2 * 4), 8)


def test_autobalance_moves_the_weights_of_the_levels(framework):
    network = ready_network(framework, autobalance=True)
    network(batch_of(framework))
    first = arrays(framework.state(network))["balance.moved_L"]
    network(batch_of(framework, seed=1))
    assert first[1] == 1
    assert not np.array_equal(first, ops.to_numpy(network.balance.moved_L))
    np.testing.assert_array_equal(
        ops.to_numpy(framework.state(network)["balance.moved_L"]), ops.to_numpy(network.balance.moved_L)
    )
    assert not any("balance" in name for name in framework.state(ready_network(framework)))


def test_training_steps_lower_the_loss(framework):
    network = ready_network(framework)
    rule = Descent(framework, network, learning_rate=0.1, momentum=0.9)
    totals = []
    for _ in range(12):
        losses = network(batch_of(framework))
        rule.step(losses["total"])
        totals.append(float(ops.to_numpy(losses["total"])))
    assert totals[-1] < 0.9 * totals[0]


def test_labels_at_thresholds_have_the_cells_of_float32_in_every_precision(framework):
    """Centres on borders and middles of cells, and sides at the threshold: where a rounding decides."""
    from mtrain.models.yolov5.loss import match

    draws = np.random.default_rng(0)
    rows = np.zeros((600, 6), np.float32)
    rows[:, 2:4] = draws.integers(0, 640, (600, 2)) / 640 * np.where(draws.random((600, 1)) < 0.5, 1, 1 - 2**-24)
    anchors = np.array(
        [[[1.25, 1.625], [2.0, 3.75]], [[1.875, 3.8125], [3.875, 2.8125]], [[3.625, 2.8125], [4.875, 6.1875]]]
    )
    sides, places = (40, 20, 10), draws.integers(0, 3, 600)
    rows[:, 4:] = anchors[places, 0] * np.asarray(4.0, np.float32) / np.array(sides)[places, None]
    decided = []
    for dtype in ("float32", "float64"):
        found = match(
            framework.tensor(rows, dtype),
            framework.tensor(anchors, dtype),
            [(side, side) for side in sides],
            threshold=4.0,
        )
        valid = framework.ops.to_numpy(found.valid_LR).astype(bool)
        cells = framework.ops.to_numpy(found.cell_LR)
        decided.append((valid, np.where(valid, cells, -1)))
        assert str(framework.ops.to_numpy(found.box_LR4).dtype) == dtype
    assert decided[0][0].any()
    for one, other in zip(*decided, strict=True):
        np.testing.assert_array_equal(one, other)
