"""The PP-YOLOE plugin: options, start values, what its network promises around the numbers; on either framework."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.errors import SpecError
from mtrain.models.common.nms import detections_by_class
from mtrain.models.ppyoloe.model import PPYOLOEm, PPYOLOEOptions, PPYOLOEs
from mtrain.spec.registry import Registry
from tests.models.ppyoloe_golden import plugin
from tests.selection import under_torch

pytestmark = pytest.mark.smoke

TASK = Task(kind="detection", class_names=("a", "b", "c"), image_size=64, global_batch=2)
PARTS = {"total", "cls", "iou", "dfl", "l1"}


@pytest.fixture(autouse=True)
def one_thread(framework):
    framework.one_thread()


class Counting(OneRank):
    """Counts the exchanges."""

    def __init__(self):
        self.calls = []

    def all_reduce(self, x, op):
        self.calls.append((op, tuple(x.shape)))
        return super().all_reduce(x, op)


def ready_network(framework, task=TASK, collective=None, dtype="float32", **options):
    chosen = plugin("s", **options)
    network = framework.to(chosen.build(task, collective or OneRank()), dtype)
    shapes = {name: tuple(x.shape) for name, x in framework.state(network).items()}
    framework.load(network, chosen.initial(shapes, task, seed=0))
    return network


def host_batch(count=2, boxes=4, size=64, seed=0, epoch=0):
    rng = np.random.default_rng(seed)
    rows = np.concatenate(
        (
            rng.integers(0, count, (boxes, 1)), rng.integers(0, 3, (boxes, 1)),
            rng.uniform(0.2, 0.8, (boxes, 2)), rng.uniform(0.1, 0.4, (boxes, 2)),
        ),
        axis=1,
    )  # fmt: skip
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return {"images": images, "targets": rows.astype(np.float32), "epoch": np.array([epoch])}


def on_device(framework, batch):
    return {name: framework.tensor(array) for name, array in batch.items()}


def numbers(framework, losses):
    return {name: float(framework.ops.to_numpy(value)) for name, value in losses.items()}


# -------------------------------------------------------------------------------------------------------------- plugin
@pytest.mark.job
@under_torch
def test_the_plugin_needs_no_framework_until_it_builds():
    code = (
        "import sys, numpy as np\n"
        "from mtrain.models.ppyoloe.model import PPYOLOEs\nfrom mtrain.core.interfaces import Task\n"
        "plugin = PPYOLOEs(PPYOLOEs.Options())\n"
        "task = Task(kind='detection', class_names=('a',), image_size=64, global_batch=2)\n"
        "task = plugin.prepare_task(task, {})\n"
        "plugin.initial({'backbone.stem.conv1.conv.weight': (16, 3, 3, 3)}, task, seed=0)\n"
        "plugin.predictions({'boxes': np.zeros((1, 4, 4)), 'scores': np.zeros((1, 4, 1))}, {})\n"
        "plugin.fused({})\n"
        "assert not {'torch', 'paddle'} & set(sys.modules)\n"
        "try: plugin.build(task, None)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "UnboundError nn.Module: no framework bound: load a backend first"


@pytest.mark.parametrize(
    "options", [{"clss": 1}, {"static_assigner_epoch": -1}, {"iou_threshold": 0}, {"max_candidates": 0}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        PPYOLOEOptions(**options)


def test_an_image_size_that_strides_do_not_divide_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match=r"image_size: 330 is not a multiple of 32 .* use 320"):
        PPYOLOEs().prepare_task(replace(TASK, image_size=330), {})


def test_class_names_that_disagree_with_the_data_are_refused():
    with pytest.raises(SpecError, match=r"3 class names \(a, b, c\), 5 classes in the annotations"):
        PPYOLOEs().prepare_task(TASK, {"class_count": 5})
    with pytest.raises(SpecError, match="at least one class"):
        PPYOLOEs().prepare_task(replace(TASK, class_names=()), {})
    assert PPYOLOEs().prepare_task(TASK, {"class_count": 3}) == TASK


def test_start_values_depend_on_seed_and_name_alone(framework):
    network = PPYOLOEs().build(TASK, OneRank())
    shapes = {name: tuple(x.shape) for name, x in framework.state(network).items()}
    values = PPYOLOEs().initial(shapes, TASK, seed=3)
    name = "backbone.stages.1.blocks.0.conv1.conv.weight"
    np.testing.assert_array_equal(values[name], PPYOLOEm().initial({name: shapes[name]}, TASK, seed=3)[name])
    assert (values[name] != PPYOLOEs().initial({name: shapes[name]}, TASK, seed=4)[name]).any()
    assert values[name].std() == pytest.approx(np.sqrt(2 / (48 * 9)), rel=0.02)
    assert {key: array.shape for key, array in values.items()} == shapes
    kinds = {key: array.dtype.name for key, array in values.items() if array.dtype != np.float32}
    assert set(kinds.values()) == {"int64"}
    assert {key.rsplit(".", 1)[-1] for key in kinds} == {"num_batches_tracked", "weight"}


def test_at_the_start_every_score_is_the_prior_and_every_distance_eight_strides(framework):
    network = ready_network(framework)
    network.eval()
    with framework.nn.no_grad():
        actual = network(on_device(framework, host_batch()))
    scores, boxes = (framework.ops.to_numpy(actual[name]) for name in ("scores", "boxes"))
    assert scores.shape == (2, 84, 3)
    np.testing.assert_allclose(scores, 0.01, rtol=1e-5)
    np.testing.assert_allclose(boxes[0, 0], (16 - 256, 16 - 256, 16 + 256, 16 + 256), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------- network
def test_the_projection_is_no_float_and_so_neither_trained_nor_averaged(framework):
    network = ready_network(framework, dtype="float64")
    weight = framework.state(network)["yolo_head.proj_conv.weight"]
    assert framework.ops.dtype(weight) == "int64"
    np.testing.assert_array_equal(framework.ops.to_numpy(weight).ravel(), np.arange(17))
    assert "yolo_head.proj_conv.weight" not in framework.parameters(network)


def test_images_are_normalised_as_imagenet_is(framework):
    network = ready_network(framework, dtype="float64")
    images = host_batch()["images"]
    actual = framework.ops.to_numpy(network.as_input(framework.tensor(images)))
    expected = (images / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
    np.testing.assert_allclose(actual, expected.transpose(0, 3, 1, 2), atol=2e-15)
    assert actual.dtype == np.float64


@pytest.mark.parametrize("epoch", [0, 99, 100])
def test_the_assigner_changes_at_the_epoch_that_the_options_say(framework, epoch):
    network = ready_network(framework, dtype="float64")
    network.train()
    batch = host_batch(epoch=epoch)
    from mtrain.models.ppyoloe.assign import truth_of

    image = network.as_input(framework.tensor(batch["images"]))
    expected = truth_of(batch["targets"], shape=(2, 64, 64), like=image)
    with framework.nn.no_grad():
        actual = numbers(framework, network(on_device(framework, batch)))
        both = [numbers(framework, network.loss(*network.outputs(image), expected, static=s)) for s in (True, False)]
    assert set(actual) == PARTS
    assert abs(both[0]["total"] - both[1]["total"]) > 1e-3
    assert actual["total"] == pytest.approx(both[0 if epoch < 100 else 1]["total"], rel=1e-12)
    assert actual["total"] == pytest.approx(actual["cls"] + 2.5 * actual["iou"] + 0.5 * actual["dfl"], rel=1e-12)


@pytest.mark.parametrize("epoch", [0, 100])
@pytest.mark.parametrize("boxes", [0, 1, 5])
def test_every_forward_exchanges_one_number_once(framework, boxes, epoch):
    collective = Counting()
    network = ready_network(framework, collective=collective)
    network.train()
    network(on_device(framework, host_batch(boxes=boxes, epoch=epoch)))
    assert collective.calls == [("mean", ())]
    network.eval()
    network(on_device(framework, host_batch()))
    assert len(collective.calls) == 1


@pytest.mark.parametrize("epoch", [0, 100])
@pytest.mark.parametrize("size", [32, 64])
def test_a_batch_without_objects_has_gradients_and_those_of_boxes_are_zero(framework, size, epoch):
    network = ready_network(framework)
    network.train()
    losses = network(on_device(framework, host_batch(boxes=0, size=size, epoch=epoch)))
    actual = numbers(framework, losses)
    assert actual["cls"] > 0
    assert actual["iou"] == actual["dfl"] == actual["l1"] == 0
    live = framework.parameters(network)
    gradients = dict(zip(live, framework.gradients(losses["total"], list(live.values())), strict=True))
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert not any(gradients[f"yolo_head.pred_reg.{i}.bias"].any() for i in range(3))
    assert all(gradients[f"yolo_head.pred_cls.{i}.bias"].any() for i in range(3))


def test_only_the_total_carries_a_gradient(framework):
    network = ready_network(framework)
    network.train()
    losses = network(on_device(framework, host_batch()))
    live = list(framework.parameters(network).values())
    assert any(gradient.any() for gradient in framework.gradients(losses["total"], live))
    for part in PARTS - {"total"}:
        value = losses[part]
        assert not getattr(value, "requires_grad", False)
        assert getattr(value, "stop_gradient", True)


# ------------------------------------------------------------------------------------------------------------- targets
def test_targets_of_any_order_become_rows_by_image(framework):
    from mtrain.models.ppyoloe.assign import truth_of

    rows = np.float32([[2, 1, 0.5, 0.5, 0.5, 0.25], [0, 2, 0.25, 0.5, 0.5, 1.0], [2, 0, 0.75, 0.5, 0.5, 1.0]])
    actual = truth_of(rows, shape=(3, 32, 64), like=framework.tensor(rows))
    np.testing.assert_array_equal(framework.ops.to_numpy(actual.labels_BN), [[2, 0], [0, 0], [1, 0]])
    boxes = framework.ops.to_numpy(actual.boxes_BN4)
    np.testing.assert_array_equal(boxes[0], [[0, 0, 32, 32], [0, 0, 0, 0]])
    np.testing.assert_array_equal(boxes[1], np.zeros((2, 4)))
    np.testing.assert_array_equal(boxes[2], [[16, 12, 48, 20], [32, 0, 64, 32]])


def test_no_targets_leave_one_empty_row(framework):
    from mtrain.models.ppyoloe.assign import truth_of

    rows = np.zeros((0, 6), np.float32)
    actual = truth_of(rows, shape=(2, 64, 64), like=framework.tensor(rows))
    assert framework.ops.shape(actual.boxes_BN4) == (2, 1, 4)
    assert not framework.ops.to_numpy(actual.boxes_BN4).any()


def test_of_equally_near_points_the_first_are_candidates(framework):
    """A box around a corner of cells is as far from four points: frameworks must not choose for themselves."""
    from mtrain.models.ppyoloe.assign import largest

    values = np.array([[3.0, 1.0, 3.0, 2.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    actual = framework.ops.to_numpy(largest(framework.tensor(values), 2))
    np.testing.assert_array_equal(actual, [[1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    rng = np.random.default_rng(0)
    values = rng.integers(0, 5, (3, 4, 40)).astype(np.float64)
    expected = np.zeros(values.shape, bool)
    np.put_along_axis(expected, np.argsort(-values, axis=2, kind="stable")[..., :9], values=True, axis=2)
    np.testing.assert_array_equal(framework.ops.to_numpy(largest(framework.tensor(values), 9)), expected)


def test_padding_more_rows_changes_nothing(framework):
    from mtrain.models.ppyoloe.assign import Truth, truth_of

    network = ready_network(framework, dtype="float64")
    network.train()
    batch = host_batch()
    with framework.nn.no_grad():
        outputs, points = network.outputs(network.as_input(framework.tensor(batch["images"])))
    expected = truth_of(batch["targets"], shape=(2, 64, 64), like=points.xy_L2)
    labels, boxes = (framework.ops.to_numpy(x) for x in (expected.labels_BN, expected.boxes_BN4))
    more = Truth(
        labels_BN=framework.tensor(np.pad(labels, ((0, 0), (0, 3)))),
        boxes_BN4=framework.tensor(np.pad(boxes, ((0, 0), (0, 3), (0, 0)))),
    )
    for static in (True, False):
        few, many = (numbers(framework, network.loss(outputs, points, t, static=static)) for t in (expected, more))
        assert few == pytest.approx(many, rel=1e-12)


def test_a_side_farther_than_the_last_bin_is_learnt_as_the_last_bin(framework):
    """A large object reaches beyond what the bins can say: its target ends 0.01 before the last of them."""
    from mtrain.models.ppyoloe.assign import points_of
    from mtrain.models.ppyoloe.loss import _distribution_loss

    stride, last = 8, 16
    scores = np.random.default_rng(2).normal(size=(1, 1, 4, last + 1))
    log = scores - np.log(np.exp(scores).sum(axis=3, keepdims=True))
    points = points_of([(1, 1)], [stride], like=framework.tensor(log))
    distances = np.array([100.0, 15.995, 15.5, -3.0])  # in strides: left, top, right, bottom
    centre = np.array([0.5, 0.5])
    box = np.concatenate((centre - distances[:2], centre + distances[2:]))[None, None]
    actual = _distribution_loss(framework.tensor(log), framework.tensor(box), points)
    targets = np.clip(distances, 0.0, last - 0.01)
    below = np.floor(targets).astype(int)
    share = targets - below
    sides = [
        (1 - s) * log[0, 0, i, b] + s * log[0, 0, i, b + 1] for i, (b, s) in enumerate(zip(below, share, strict=True))
    ]
    np.testing.assert_allclose(framework.ops.to_numpy(actual), [[-np.mean(sides)]], rtol=1e-12)


# --------------------------------------------------------------------------------------------------------- predictions
def suppressed_one_by_one(boxes, scores, *, confidence, iou_threshold, max_candidates, max_detections):
    """Class by class, box by box."""
    saved = []
    for label in range(scores.shape[1]):
        order = np.argsort(-scores[:, label], kind="stable")
        order = order[scores[order, label] > confidence][:max_candidates]
        chosen = []
        for i in order:
            area = np.prod(boxes[i, 2:] - boxes[i, :2])
            for j in chosen:
                sides = np.clip(
                    np.minimum(boxes[i, 2:], boxes[j, 2:]) - np.maximum(boxes[i, :2], boxes[j, :2]), 0, None
                )
                inter = np.prod(sides)
                if inter > iou_threshold * (area + np.prod(boxes[j, 2:] - boxes[j, :2]) - inter):
                    break
            else:
                chosen.append(i)
        saved += [[*boxes[i], scores[i, label], label] for i in chosen]
    rows = np.array(saved, np.float32).reshape(-1, 6)
    return rows[np.argsort(-rows[:, 4], kind="stable")][:max_detections]


@under_torch
@pytest.mark.parametrize("max_candidates", [5, 1000])
@pytest.mark.parametrize("max_detections", [10, 300])
def test_suppression_is_that_of_each_class_alone(max_candidates, max_detections):
    rng = np.random.default_rng(5)
    corners = rng.uniform(0, 60, (150, 2))
    boxes = np.concatenate((corners, corners + rng.uniform(5, 40, (150, 2))), axis=1).astype(np.float32)
    scores = (rng.uniform(0, 1, (150, 4)) ** 4).astype(np.float32)
    chosen = {
        "confidence": 0.05, "iou_threshold": 0.5, "max_candidates": max_candidates, "max_detections": max_detections,
    }  # fmt: skip
    actual = detections_by_class(boxes, scores, **chosen)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, suppressed_one_by_one(boxes, scores, **chosen))


def test_an_image_where_nothing_is_found_has_no_rows():
    output = {"boxes": np.zeros((2, 84, 4), np.float32), "scores": np.zeros((2, 84, 3), np.float32)}
    assert [rows.shape for rows in PPYOLOEs().predictions(output, {})] == [(0, 6), (0, 6)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 17, 63, 64, 65, 200])
def test_objects_are_padded_to_numbers_that_repeat(count: int) -> None:
    from mtrain.models.ppyoloe.truth import rows_for

    rows = rows_for(count)
    assert max(count, 1) <= rows <= max(count * 1.125, 1)
    assert len({rows_for(n) for n in range(64, 129)}) == 9


def test_an_arranged_micro_batch_has_the_losses_of_the_plain_one_bit_for_bit(framework) -> None:
    """Padding more rows changes no bit either, in both assigners."""
    from mtrain.core.collective import OneRank
    from mtrain.core.interfaces import Task
    from mtrain.spec import plugins

    plugin = plugins.load("models", "ppyoloe_s")(
        Registry.read().options("models", "ppyoloe_s", {"static_assigner_epoch": 1}, path="")
    )
    task = Task(kind="detection", class_names=("a", "b"), image_size=64, global_batch=2)
    network = plugin.build(task, OneRank())
    values = plugin.initial({n: tuple(x.shape) for n, x in framework.state(network).items()}, task, seed=0)
    framework.load(network, values)
    network.train()
    random = np.random.default_rng(0)
    boxes = np.concatenate((random.random((11, 2)), random.random((11, 2)) * 0.5 + 0.1), 1)
    rows = np.concatenate((np.array([[i % 4 == 0, i % 2] for i in range(11)]), boxes), 1).astype(np.float32)
    images = random.integers(0, 255, (2, 64, 64, 3), dtype=np.uint8)
    for epoch in (0, 1):
        plain = {"images": images, "targets": rows, "epoch": np.array([epoch])}
        arranged = dict(plugin.arranged(plain))
        assert ("static" in arranged, "targets" in arranged) == (epoch == 0, False)
        padded = {**arranged, "labels": np.pad(arranged["labels"], ((0, 0), (0, 9))),
                  "boxes": np.pad(arranged["boxes"], ((0, 0), (0, 9), (0, 0)))}  # fmt: skip
        losses = []
        for batch in (plain, arranged, padded):
            tensors = {name: framework.tensor(array) for name, array in batch.items()}
            losses.append({n: framework.ops.to_numpy(x).tobytes() for n, x in network(tensors).items()})
        assert losses[0] == losses[1] == losses[2]


def test_points_at_thresholds_are_assigned_to_labels_as_in_float32_in_every_precision(framework):
    """Boxes on whole pixels, whose candidates are equally far or overlap equally: where a rounding decides."""
    from mtrain.models.ppyoloe.assign import points_of, truth_of
    from mtrain.models.ppyoloe.loss import assign

    draws = np.random.default_rng(0)
    rows = np.zeros((240, 6), np.float32)
    rows[:, 0], rows[:, 1] = np.arange(240) % 8, draws.integers(0, 3, 240)
    corners = draws.integers(0, 30, (240, 2)) * 8
    sizes = draws.integers(1, 10, (240, 2)) * 8
    rows[:, 2:4], rows[:, 4:] = (corners + sizes / 2) / 320, sizes / 320
    decided = []
    for dtype in ("float32", "float64"):
        like = framework.tensor(np.zeros(1), dtype)
        points = points_of([(10, 10), (20, 20), (40, 40)], (32, 16, 8), like=like)
        boxes = framework.tensor(np.tile([0.0, 0.0, 9.0, 7.0], (8, 2100, 1)), dtype)
        truth = truth_of(rows, shape=(8, 320, 320), like=framework.tensor(np.zeros(1), "float32"))
        found = assign(boxes, framework.tensor(np.zeros((8, 2100, 3)), dtype), points, truth, static=True)
        decided.append(
            [
                framework.ops.to_numpy(x).astype(np.float64)
                for x in (found.positive_BL, found.labels_BL, found.boxes_BL4)
            ]
        )
        assert str(framework.ops.to_numpy(found.quality_BL).dtype) == dtype
    assert 100 < decided[0][0].sum() < 8 * 2100
    for one, other in zip(*decided, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_predictions_decide_is_noted_for_each_image_where_it_is_asked_for(framework):
    network = ready_network(framework, dtype="float64")
    network.train()
    network(on_device(framework, host_batch(epoch=100)))
    assert network.decided is None
    network.decided = []
    network(on_device(framework, host_batch(epoch=0)))
    assert network.decided == [], "labels alone decide in the first epochs"
    network(on_device(framework, host_batch(epoch=100)))
    (compared_BL4,) = network.decided
    noted = framework.ops.to_numpy(compared_BL4)
    assert noted.dtype == np.float32
    assert noted.shape == (2, 64 + 16 + 4, 4)
    assert noted.any(axis=(1, 2)).all()
