"""PP-YOLOE computes what the published code computes, on either framework: the tolerances are those of the stored
numbers."""

import json

import numpy as np
import pytest

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Recipe
from mtrain.core.update.recipe import ema_shares
from tests.models.ppyoloe_golden import (
    FOLDER,
    PARTS,
    RULES,
    Job,
    assert_close,
    assert_rows_close,
    facts,
    is_counter,
    plugin,
    published,
    stats_vector,
    stored,
    summary_row,
    task,
    truth,
)
from tests.selection import quick, under_torch

SIZES = ("s", "m", "l", "x")
INPUTS_OF_S = [(80, 64, 64), (80, 128, 128), (80, 96, 160), (3, 64, 64), (3, 128, 128), (3, 96, 160)]
FORWARDS = [("s", *case) for case in INPUTS_OF_S] + [("m", 80, 64, 64)]
LARGE_FORWARDS = [(size, 80, 64, 64) for size in ("l", "x")]
LOSSES = sorted(path.stem for path in (FOLDER / "loss").glob("*.npz"))
STEPPED = [name for name in LOSSES if name.startswith("s_") and name.endswith("_normal")]
EXACT, STEPPED_EXACT = 1e-7, 1e-5
SMALL_LOSSES = ["s_nc3_64x64_tal_normal", "s_nc3_96x160_atss_normal", "s_nc3_128x128_tal_one_empty"]
LARGER_LOSSES = [
    *("s_nc3_96x160_tal_normal", "s_nc3_128x128_atss_one_empty", "s_nc3_128x128_tal_all_empty"),
    *(
        "s_nc3_128x128_atss_all_empty",
        "s_nc80_64x64_tal_normal",
        "s_nc80_96x160_atss_normal",
        "m_nc80_64x64_tal_normal",
    ),
]


@pytest.fixture(autouse=True)
def one_thread(framework):
    framework.one_thread()


def case_id(case):
    size, classes, height, width = case
    return f"{size}_nc{classes}_{height}x{width}"


def forwards(cases):
    """The quick ones of ``cases``: another number of classes or a larger square changes no line that is run."""
    chosen = [case_id(case) for case in cases if case[1] == 3 and case[2:] != (128, 128)]
    torch = [case_id(case) for case in cases if case[1] == 80 and case[0] in "sm" and case[2:] != (128, 128)]
    return quick(cases, chosen, torch, name=case_id)


def parsed(name):
    """(size, classes, height, width, static, case) of a loss file."""
    size, classes, image, assigner, case = name.split("_", 4)
    height, width = map(int, image.split("x"))
    return size, int(classes.removeprefix("nc")), height, width, assigner == "atss", case


# --------------------------------------------------------------------------------------------------------------- state
@pytest.mark.parametrize("classes", [80, 3])
@pytest.mark.parametrize("size", quick(SIZES, "s", "mlx"))
def test_names_shapes_and_counts_are_those_of_the_published_model(framework, size, classes):
    network = plugin(size).build(task(classes), OneRank())
    expected = facts(size, classes)
    state = {published(name): tuple(x.shape) for name, x in framework.state(network).items() if not is_counter(name)}
    assert state == {name: shape for name, (shape, _, _) in expected["entries"].items()}
    assert list(state) == list(expected["entries"])
    trained = framework.parameters(network)
    assert sorted(map(published, trained)) == sorted(name for name, entry in expected["entries"].items() if entry[2])
    assert len(trained) == expected["trainable_tensors"]
    assert sum(int(np.prod(x.shape)) for x in trained.values()) == expected["numel_trainable"]
    assert sum(int(np.prod(shape)) for shape in state.values()) == expected["numel_state_dict"]


def test_the_fill_is_the_stored_one():
    kernel = RULES.fill("backbone.stem.conv1.conv.weight", [16, 3, 3, 3]).ravel()[:3]
    np.testing.assert_array_equal(kernel, np.float32([-0.165111065, 0.291151732, 0.183448419]))
    image = RULES.image(64, 64)[0, 0, 0, :3]
    np.testing.assert_array_equal(image, np.float32([-0.444117159, -1.06593537, -1.23383749]))


# ------------------------------------------------------------------------------------------------------------- forward
def record_taps(network, names):
    """Outputs of the layers ``names``, of their last call, as they are made; those of a BatchNorm before its SiLU."""
    from mtrain.core import ops

    taken = {}

    def watch(name, layer):
        forward = layer.forward

        def watched(*inputs):
            silu, layer.silu = getattr(layer, "silu", False), False
            taken[name] = forward(*inputs)
            layer.silu = silu
            return ops.silu(taken[name]) if silu else taken[name]

        layer.forward = watched

    for name in names:
        layer = network
        for part in name.split("."):
            layer = getattr(layer, part)
        watch(name, layer)
    return taken


def tapped_layers(names):
    """Those of the published layers that are layers here: pools and the projection are functions."""
    return [name for name in names if ".pool" not in name and not name.endswith("proj_conv")]


def check_features(framework, job, image, expected):
    with framework.nn.no_grad():
        maps = job.network.backbone(image)
        necks = job.network.neck(maps)
    for part, levels in (("backbone", maps), ("neck", necks)):
        for i, level in enumerate(levels):
            value = framework.ops.to_numpy(level)
            assert list(value.shape) == list(expected[f"{part}.{i}.shape"])
            assert_close(stats_vector(value, 64), expected[f"{part}.{i}.stats"], EXACT, f"{part}.{i}")
            if f"{part}.{i}" in expected:
                assert_close(value, expected[f"{part}.{i}"], EXACT, f"{part}.{i}")


@pytest.mark.parametrize("case", forwards(FORWARDS + LARGE_FORWARDS))
def test_evaluation(framework, case):
    size, classes, height, width = case
    expected, ops = stored(f"forward/{case_id(case)}_eval"), framework.ops
    job = Job.filled(framework, size, classes)
    job.mode(training=False)
    image = job.image(height, width)
    check_features(framework, job, image, expected)
    names = tapped_layers(expected["tap_names"])
    taken = record_taps(job.network, names)
    with framework.nn.no_grad():
        outputs, points = job.network.outputs(image)
    rows = dict(zip(expected["tap_names"], expected["taps"], strict=True))
    for name in names:
        assert_close(stats_vector(ops.to_numpy(taken[name]), 16), rows[name], EXACT, name)
    check_decoded(framework, outputs, points, expected)


def check_decoded(framework, outputs, points, expected):
    from mtrain.models.ppyoloe.loss import decode

    ops = framework.ops
    with framework.nn.no_grad():
        boxes, _ = decode(outputs, points)
        scores = ops.sigmoid(outputs.logits_BLC)
    xy, stride = ops.to_numpy(points.xy_L2), ops.to_numpy(points.stride_L1)
    assert_close(ops.to_numpy(scores).transpose(0, 2, 1), expected["scores"], EXACT, "scores")
    assert_close(xy / stride, expected["anchor_points"], EXACT, "points")
    assert_close(stride, expected["stride_tensor"], EXACT, "strides")
    boxes = ops.to_numpy(boxes)
    distances = np.concatenate((xy / stride - boxes[..., :2], boxes[..., 2:] - xy / stride), axis=2)
    assert_close(distances, expected["reg_dist"], EXACT, "distances")
    assert_close(boxes * stride, expected["boxes"], EXACT, "boxes")


@pytest.mark.parametrize("case", forwards(FORWARDS + LARGE_FORWARDS))
def test_training_forward_and_running_statistics(framework, case):
    from mtrain.models.ppyoloe.loss import decode

    size, classes, height, width = case
    expected, ops = stored(f"forward/{case_id(case)}_train"), framework.ops
    job = Job.filled(framework, size, classes)
    job.mode(training=True)
    names = tapped_layers(expected["tap_names"])
    taken = record_taps(job.network, names)
    with framework.nn.no_grad():
        outputs, points = job.network.outputs(job.image(height, width))
        boxes, _ = decode(outputs, points)
    rows = dict(zip(expected["tap_names"], expected["taps"], strict=True))
    for name in names:
        assert_close(stats_vector(ops.to_numpy(taken[name]), 16), rows[name], EXACT, name)
    scores = ops.to_numpy(ops.sigmoid(outputs.logits_BLC))
    assert_close(scores, expected["pred_scores"], EXACT, "scores")
    logits = ops.to_numpy(outputs.distances_BLSK)
    assert_close(logits.reshape(*logits.shape[:2], -1), expected["pred_distri"], EXACT, "distance logits")
    assert_close(ops.to_numpy(boxes), expected["pred_bboxes_stride_units"], EXACT, "boxes")
    assert_close(ops.to_numpy(points.xy_L2), expected["anchor_points"], EXACT, "points")
    assert_close(ops.to_numpy(points.anchors_L4()), expected["anchors"], EXACT, "anchor boxes")
    assert list(points.sizes) == list(expected["num_anchors_list"])
    state = job.state()
    statistics = [name for name in state if name.endswith(("._mean", "._variance"))]
    actual = np.array([summary_row(name, state[name]) for name in statistics])
    assert_rows_close(statistics, actual, expected["bn_after"], STEPPED_EXACT)


@pytest.mark.parametrize("case", forwards(FORWARDS[:6]))
def test_float32_is_within_the_tolerances_of_the_published_run(framework, case):
    size, classes, height, width = case
    expected = stored(f"forward/{case_id(case)}_train")
    job = Job.filled(framework, size, classes, dtype="float32")
    job.mode(training=True)
    outputs, points = job.network.outputs(job.image(height, width))
    ops = framework.ops
    scores = ops.to_numpy(ops.sigmoid(outputs.logits_BLC))
    assert_close(scores, expected["pred_scores"], 1e-4, "scores")
    logits = ops.to_numpy(outputs.distances_BLSK)
    assert_close(logits.reshape(*logits.shape[:2], -1), expected["pred_distri"], 1e-4, "distance logits")
    trained = stored(f"loss/{case_id(case)}_tal_normal")
    losses = job.network.loss(outputs, points, job.truth(height, width, classes, "normal"), static=False)
    np.testing.assert_allclose(job.numbers(losses), trained["losses"], rtol=1e-4)
    gradients = job.gradients(losses["total"])
    norms = np.array([np.sqrt(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values()])
    by_name = dict(zip(trained["grad_names"], trained["grad_summary"], strict=True))
    expected_norms = np.array([by_name[published(name)][0] for name in gradients])
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-3, atol=1e-6 * expected_norms.max())


# ------------------------------------------------------------------------------------------------- losses and gradients
@pytest.mark.parametrize("name", quick(LOSSES, SMALL_LOSSES, LARGER_LOSSES))
def test_losses_assignment_and_gradients(framework, name):
    from mtrain.models.ppyoloe.loss import assign, decode

    size, classes, height, width, static, case = parsed(name)
    expected = stored(f"loss/{name}")
    job = Job.filled(framework, size, classes)
    job.mode(training=True)
    outputs, points = job.network.outputs(job.image(height, width))
    targets = job.truth(height, width, classes, case)
    actual = assign(decode(outputs, points)[0], outputs.logits_BLC, points, targets, static=static)
    check_assignment(framework, actual, classes, expected, "assigned_labels", "assigned_bboxes", "assigned_scores")
    losses = job.network.loss(outputs, points, targets, static=static)
    np.testing.assert_allclose(job.numbers(losses), expected["losses"], rtol=EXACT, atol=1e-12)
    gradients = {published(key): value for key, value in job.gradients(losses["total"]).items()}
    names = list(expected["grad_names"])
    assert sorted(gradients) == sorted(names)
    rows = np.array([summary_row(key, gradients[key]) for key in names])
    # Rounding on the way back is that of the large gradients: it shows in the small ones.
    floor = 1e-3 * expected["grad_summary"][:, 0].max()
    assert_rows_close(names, rows, expected["grad_summary"], EXACT, floor=floor)
    for key in (key for key in expected if key.startswith("grad.")):
        assert_close(gradients[key.removeprefix("grad.")], expected[key], EXACT, key)


def check_assignment(framework, result, classes, expected, labels, boxes, scores):
    ops = framework.ops
    positive, found_labels = ops.to_numpy(result.positive_BL), ops.to_numpy(result.labels_BL)
    np.testing.assert_array_equal(np.where(positive, found_labels, classes), expected[labels])
    assert_close(ops.to_numpy(result.boxes_BL4), expected[boxes], EXACT, "assigned boxes")
    quality = ops.to_numpy(result.quality_BL)
    assert not quality[~positive].any()
    columns = np.eye(classes)[found_labels] * (quality * positive)[:, :, None]
    assert_close(columns, expected[scores], EXACT, "assigned scores")


@pytest.mark.parametrize("assigner", ["atss", "tal"])
def test_both_assigners_in_a_crowd(framework, assigner):
    from mtrain.models.ppyoloe.assign import assign_aligned, assign_static, points_of

    scores, predicted, labels, boxes, _ = RULES.assign_input()
    strides = (32, 16, 8)
    logits = framework.tensor(np.log(scores / (1 - scores)))
    points = points_of([(160 // s, 224 // s) for s in strides], strides, like=logits)
    expected, predicted = truth(framework, labels, boxes, "float64"), framework.tensor(predicted)
    if assigner == "atss":
        actual = assign_static(expected, points, predicted)
    else:
        actual = assign_aligned(expected, points, predicted, logits)
    names = (f"{assigner}.labels", f"{assigner}.bboxes", f"{assigner}.scores")
    check_assignment(framework, actual, 5, stored("assign"), *names)


# --------------------------------------------------------------------------------------------------------------- steps
class Momentum:
    """SGD with momentum 0.9, weight decay 5e-4 on all but BatchNorm's scale and shift.

    The stored runs' kernel held 0.9 as float32. It matters where three steps of an unstable learning rate amplify it.
    """

    momentum = float(np.float32(0.9))

    def __init__(self, learning_rate):
        self.learning_rate, self.velocity = learning_rate, {}

    def step(self, job, gradients):
        live = {name: job.framework.ops.to_numpy(x) for name, x in job.framework.parameters(job.network).items()}
        moved = {}
        for name, gradient in gradients.items():
            decay = 0.0 if ".bn." in name else 5e-4
            velocity = self.momentum * self.velocity.get(name, 0.0) + gradient + decay * live[name]
            self.velocity[name] = velocity
            moved[name] = live[name] - self.learning_rate * velocity
        job.framework.load(job.network, moved)


def summary_of(state, names):
    return np.array([summary_row(name, state[name]) for name in names])


def check_stepped(start, states, expected, prefix):
    names = list(expected["state_names"])
    assert_rows_close(names, summary_of(states[-1], names), expected[f"{prefix}params_after_3"], STEPPED_EXACT)
    for key, found in (("delta_after_1", states[0]), ("delta_after_3", states[-1])):
        moved = {name: found[name] - start[name] for name in names}
        # The change of what hardly moves is the rounding of what it is subtracted from.
        floor = 1e-6 * max(float(row[0]) for row in expected[prefix + key])
        assert_rows_close(names, summary_of(moved, names), expected[prefix + key], STEPPED_EXACT, floor=floor)


@pytest.mark.parametrize("learning_rate", ["0.01", pytest.param("0.001", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(STEPPED, SMALL_LOSSES[:2], LARGER_LOSSES[4:5]))
def test_three_steps_and_their_average(framework, name, learning_rate):
    size, classes, height, width, static, case = parsed(name)
    expected, prefix = stored(f"loss/{name}"), f"lr{learning_rate}."
    job = Job.filled(framework, size, classes)
    job.mode(training=True)
    start, rule, average = job.state(), Momentum(float(learning_rate)), {}
    recipe = Recipe(rule="sgd", groups=(), micro_batch=2, ema_decay=0.9998, ema_rule="threshold")
    image, targets = job.image(height, width), job.truth(height, width, classes, case)
    numbers, states = [], []
    for update in (1, 2, 3):
        losses = job.losses(image, targets, static=static)
        numbers.append(job.numbers(losses))
        rule.step(job, job.gradients(losses["total"]))
        state = job.state()
        states.append(state)
        keep, take = ema_shares(recipe, update)
        average = {key: keep * average.get(key, 0.0) + take * value for key, value in state.items()}
    check_stepped(start, states, expected, prefix)
    names = [key for key in expected["state_names"] if key != "yolo_head.proj_conv.weight"]
    rows = dict(zip(expected["state_names"], expected[f"{prefix}ema_after_3"], strict=True))
    assert_rows_close(names, summary_of(average, names), np.array([rows[key] for key in names]), STEPPED_EXACT)
    check_after(framework, job, image, targets, static, numbers, expected, prefix)


def check_after(framework, job, image, wanted, static, numbers, expected, prefix):
    """Check the loss after the last step, and the outputs of the stepped network in evaluation."""
    from mtrain.models.ppyoloe.loss import decode

    ops = framework.ops
    job.mode(training=False)
    with framework.nn.no_grad():
        outputs, points = job.network.outputs(image)
        boxes, _ = decode(outputs, points)
    scores = ops.to_numpy(ops.sigmoid(outputs.logits_BLC)).transpose(0, 2, 1)
    assert_close(stats_vector(scores, 64), expected[f"{prefix}eval_scores_after_3"], STEPPED_EXACT, "scores")
    centre, boxes = ops.to_numpy(points.xy_L2 / points.stride_L1), ops.to_numpy(boxes)
    distances = np.concatenate((centre - boxes[..., :2], boxes[..., 2:] - centre), axis=2)
    assert_close(stats_vector(distances, 64), expected[f"{prefix}eval_reg_after_3"], STEPPED_EXACT, "distances")
    job.mode(training=True)
    with framework.nn.no_grad():
        numbers.append(job.numbers(job.losses(image, wanted, static=static)))
    np.testing.assert_allclose(np.array(numbers), expected[f"{prefix}step_losses"], rtol=STEPPED_EXACT)


class Ranks:
    """Two ranks that take turns: the mean is that of what each says, the other's known from a run before."""

    rank, size = 0, 2

    def __init__(self, ops):
        self.ops, self.said, self.others = ops, [], []

    def all_reduce(self, x, op):
        assert op == "mean"
        value = float(self.ops.to_numpy(x))
        self.said.append(value)
        other = self.others[len(self.said) - 1] if self.others else value
        return self.ops.detach(x) * 0 + (value + other) / 2


@pytest.mark.parametrize("assigner", quick(["atss", "tal"], [], ["tal"]))
def test_two_ranks_share_the_normaliser(framework, assigner):
    expected = stored(f"dist2/s_nc80_128x128_{assigner}")
    ranks = [Ranks(framework.ops) for _ in range(2)]
    jobs = [Job.filled(framework, "s", 80, collective=collective) for collective in ranks]
    images = [job.image(128, 128, f"image_128x128_rank{rank}") for rank, job in enumerate(jobs)]
    truths = [job.truth(128, 128, 80, case) for job, case in zip(jobs, ("normal", "one_empty"), strict=True)]
    rules, start, names = [Momentum(0.01), Momentum(0.01)], jobs[0].state(), list(expected["grad_names"])
    numbers, states = [], ([], [])
    for step in range(3):
        gradients = step_of_ranks(jobs, ranks, images, truths, static=assigner == "atss", numbers=numbers)
        if step == 0:
            rows = summary_of({published(key): value for key, value in gradients.items()}, names)
            assert_rows_close(names, rows, expected["grad_summary"], EXACT)
        for rank, (job, rule) in enumerate(zip(jobs, rules, strict=True)):
            rule.step(job, gradients)
            states[rank].append(job.state())
    actual = np.array(numbers).reshape(3, 2, len(PARTS)).transpose(1, 0, 2)
    np.testing.assert_allclose(actual, expected["step_losses"], rtol=STEPPED_EXACT)
    for rank in range(2):
        mine = {key: value[rank] for key, value in expected.items() if key.endswith(("_1", "_3"))}
        check_stepped(start, states[rank], mine | {"state_names": expected["state_names"]}, "")


def step_of_ranks(jobs, ranks, images, truths, *, static, numbers):
    """Mean gradient of one step; each rank's losses are appended to ``numbers``."""
    outputs = []
    for job, image in zip(jobs, images, strict=True):
        job.mode(training=True)
        outputs.append(job.network.outputs(image))
    for collective in ranks:
        collective.said, collective.others = [], []
    for job, output, wanted in zip(jobs, outputs, truths, strict=True):
        with job.framework.nn.no_grad():
            job.network.loss(*output, wanted, static=static)
    messages = [list(collective.said) for collective in ranks]
    gradients = []
    for rank, (job, output, wanted) in enumerate(zip(jobs, outputs, truths, strict=True)):
        ranks[rank].said, ranks[rank].others = [], messages[1 - rank]
        losses = job.network.loss(*output, wanted, static=static)
        assert len(ranks[rank].said) == 1
        numbers.append(job.numbers(losses))
        gradients.append(job.gradients(losses["total"]))
    return {name: (gradients[0][name] + gradients[1][name]) / 2 for name in gradients[0]}


# ------------------------------------------------------------------------------------------------ suppression, inference
VARIANTS = {
    "default": {},
    "topk20_keep30": {"max_candidates": 20, "max_detections": 30},
    "score0.3_iou0.5": {"confidence": 0.3, "iou_threshold": 0.5},
    "score0.999": {"confidence": 0.99999},
}


@under_torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_suppression(variant):
    expected = stored("nms")
    output = {"boxes": expected["boxes"], "scores": expected["scores"].transpose(0, 2, 1)}
    actual = plugin("s", **VARIANTS[variant]).predictions(output, {})
    assert [len(rows) for rows in actual] == list(expected[f"{variant}.num"])
    for rows in actual:
        assert (np.diff(rows[:, 4]) <= 0).all()
    by_label = [rows[np.lexsort((-rows[:, 4], rows[:, 5]))][:, [5, 4, 0, 1, 2, 3]] for rows in actual]
    np.testing.assert_array_equal(np.concatenate(by_label), expected[f"{variant}.out"])


@pytest.mark.parametrize("classes", quick([80, 3], ["3"], ["80"]))
def test_the_form_for_inference_sees_the_same(framework, classes):
    expected = stored(f"deploy/s_nc{classes}_128x128")
    job = Job.filled(framework, "s", classes)
    arrays = {name: np.array(framework.ops.to_numpy(x)) for name, x in framework.state(job.network).items()}
    weights = plugin("s").fused(arrays)
    saved = {published(name): array for name, array in weights.items() if not is_counter(name)}
    shapes = {name: tuple(json.loads(shape)) for name, shape in zip(expected["names"], expected["shapes"], strict=True)}
    assert {name: array.shape for name, array in saved.items()} == shapes
    names = list(expected["names"])
    assert_rows_close(names, summary_of(saved, names), expected["summary"], EXACT)
    for key in (key for key in expected if key.startswith("full.")):
        assert_close(saved[key.removeprefix("full.")], expected[key], EXACT, key)
    network = framework.to(plugin("s", deploy=True).build(task(classes), OneRank()), "float64")
    assert list(framework.state(network)) == list(weights)
    framework.load(network, weights)
    network.eval()
    job.mode(training=False)
    image = job.image(128, 128)
    with framework.nn.no_grad():
        before, points = job.network.outputs(image)
        after, _ = network.outputs(image)
    logits = framework.ops.to_numpy(after.logits_BLC)
    assert_close(logits, framework.ops.to_numpy(before.logits_BLC), 1e-9, "logits")
    assert_close(1 / (1 + np.exp(-logits)).transpose(0, 2, 1), expected["scores"], EXACT, "scores")
    check_decoded(framework, after, points, stored(f"forward/s_nc{classes}_128x128_eval"))
