"""The vision transformer plugin: options, start values, and a network that computes what the paper's equations say."""

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.core.update.recipe import group_rules
from mtrain.errors import SpecError
from mtrain.models.vit.model import ViT, ViTOptions
from tests.models.sgd import Descent, arrays
from tests.models.yolov5_small import shapes_of
from tests.selection import under_torch

pytestmark = pytest.mark.smoke

TASK = Task(kind="classification", class_names=("a", "b", "c", "d", "e"), image_size=8, global_batch=6)
SMALL = {"patch": 4, "width": 12, "depth": 2, "heads": 3, "mlp_ratio": 2}
POOLINGS = ("mean", "token")


def ready_network(framework, *, dtype="float32", noise=0.0, **options):
    """With start values, moved by ``noise`` so that biases and norms matter too, in training mode."""
    plugin = ViT(ViTOptions(**{**SMALL, **options}))
    network = plugin.build(TASK)
    values = plugin.initial(shapes_of(framework, network), TASK, seed=0)
    rng = np.random.default_rng(7)
    framework.load(network, {name: x + noise * rng.normal(size=x.shape) for name, x in values.items()})
    network = framework.to(network, dtype)
    network.train()
    return network


def host_batch(*, count=6, side=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8),
        "labels": rng.integers(0, 5, count),
    }


def tensors(framework, batch):
    return {name: framework.tensor(array) for name, array in batch.items()}


# ---------------------------------------------------------------------------------- the same network, image by image
def normalised(x, values, name):
    deviation = np.sqrt(((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) / deviation * values[f"{name}.weight"] + values[f"{name}.bias"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attended(x_ND, values, name, heads):
    """Head by head; the rows of ``qkv`` are those of queries, keys, values, each head after head."""
    width = x_ND.shape[1]
    size = width // heads
    matrices = values[f"{name}.qkv.weight"].reshape(3, heads, size, width)
    biases = values.get(f"{name}.qkv.bias", np.zeros(3 * width)).reshape(3, heads, size)
    mixed = []
    for head in range(heads):
        queries, keys, contents = (x_ND @ matrices[which, head].T + biases[which, head] for which in range(3))
        mixed.append(softmax(queries @ keys.T / math.sqrt(size)) @ contents)
    return np.concatenate(mixed, axis=1) @ values[f"{name}.out.weight"].T + values[f"{name}.out.bias"]


def logits_of(image, values, options):
    """Compute the logits of one uint8 image, cut into patches by loops."""
    side, patch = len(image), options.patch
    pixels = image.astype(np.float64) * (2 / 255) - 1
    patches = [
        pixels[y : y + patch, x : x + patch].reshape(-1) for y in range(0, side, patch) for x in range(0, side, patch)
    ]
    x_ND = np.stack(patches) @ values["embedding.weight"].T + values["embedding.bias"]
    if options.pooling == "token":
        x_ND = np.concatenate([values["token"][0], x_ND])
    x_ND = x_ND + values["positions"][0]
    for i in range(options.depth):
        name = f"blocks.{i}"
        x_ND = x_ND + attended(normalised(x_ND, values, f"{name}.norm1"), values, f"{name}.attention", options.heads)
        hidden = normalised(x_ND, values, f"{name}.norm2") @ values[f"{name}.perceptron.inner.weight"].T
        hidden = gelu(hidden + values[f"{name}.perceptron.inner.bias"])
        x_ND = x_ND + hidden @ values[f"{name}.perceptron.outer.weight"].T + values[f"{name}.perceptron.outer.bias"]
    x_ND = normalised(x_ND, values, "norm")
    pooled = x_ND[0] if options.pooling == "token" else x_ND.mean(axis=0)
    return pooled @ values["head.weight"].T + values["head.bias"]


@pytest.mark.parametrize(("pooling", "qkv_bias"), [("mean", False), ("token", False), ("token", True)])
def test_the_network_computes_what_the_equations_say(framework, pooling, qkv_bias):
    network = ready_network(framework, dtype="float64", noise=0.3, pooling=pooling, qkv_bias=qkv_bias)
    batch, values = host_batch(), arrays(framework.state(network))
    options = ViTOptions(**SMALL, pooling=pooling, qkv_bias=qkv_bias)
    network.eval()
    actual = ops.to_numpy(network(tensors(framework, batch))["probabilities"])
    expected = np.stack([softmax(logits_of(image, values, options)) for image in batch["images"]])
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_total_is_the_mean_cross_entropy_of_the_micro_batch(framework, smoothing):
    network = ready_network(framework, dtype="float64", noise=0.3, label_smoothing=smoothing)
    batch = host_batch()
    losses = network(tensors(framework, batch))
    assert set(losses) == {"total"}
    network.eval()
    logs = np.log(ops.to_numpy(network(tensors(framework, batch))["probabilities"]))
    target = np.eye(5)[batch["labels"]] * (1 - smoothing) + smoothing / 5
    assert float(ops.to_numpy(losses["total"])) == pytest.approx(-(target * logs).sum(axis=1).mean(), rel=1e-12)


@pytest.mark.parametrize(("pooling", "qkv_bias"), [("mean", False), ("token", False), ("token", True)])
def test_gradients_are_the_slopes_of_the_loss(framework, pooling, qkv_bias):
    network = ready_network(framework, dtype="float64", noise=0.3, pooling=pooling, qkv_bias=qkv_bias)
    batch = tensors(framework, host_batch())
    parameters = framework.parameters(network)
    actual = dict(zip(parameters, framework.gradients(network(batch)["total"], list(parameters.values())), strict=True))
    rng, step = np.random.default_rng(3), 1e-5
    values = arrays(parameters)
    for name, value in values.items():
        direction = rng.normal(size=value.shape)
        ends = []
        for sign in (1, -1):
            framework.load(network, {name: value + sign * step * direction})
            ends.append(float(ops.to_numpy(network(batch)["total"])))
        framework.load(network, {name: value})
        slope = (ends[0] - ends[1]) / (2 * step)
        assert (actual[name] * direction).sum() == pytest.approx(slope, rel=1e-5, abs=1e-8), name
        assert actual[name].any(), name
        if name.endswith("qkv.bias"):  # queries, keys, values
            assert [part.any() for part in actual[name].reshape(3, -1)] == [True, False, True]


def test_the_order_of_images_in_a_batch_means_nothing_and_that_of_patches_does(framework):
    network = ready_network(framework, dtype="float64", noise=0.3)
    network.eval()
    images = host_batch()["images"]

    def probabilities(images):
        return ops.to_numpy(network({"images": framework.tensor(np.ascontiguousarray(images))})["probabilities"])

    np.testing.assert_allclose(probabilities(images[::-1]), probabilities(images)[::-1], rtol=1e-12)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], axis=1)
    assert np.abs(probabilities(swapped) - probabilities(images)).max() > 1e-3


def test_training_steps_lower_the_loss(framework):
    network, batch = ready_network(framework), tensors(framework, host_batch())
    rule, totals = Descent(framework, network, learning_rate=0.1, momentum=0.9), []
    for _ in range(20):
        losses = network(batch)
        rule.step(losses["total"])
        totals.append(float(ops.to_numpy(losses["total"])))
    assert totals[0] == pytest.approx(math.log(5), rel=0.5)
    assert totals[-1] < 0.3 * totals[0]


# ------------------------------------------------------------------------------------------------------------ the plugin
@pytest.mark.parametrize("pooling", POOLINGS)
def test_start_values_depend_on_seed_and_name_alone(framework, pooling):
    plugin = ViT(ViTOptions(**SMALL, pooling=pooling))
    network = plugin.build(TASK)
    shapes = shapes_of(framework, network)
    first = plugin.initial(shapes, TASK, seed=3)
    backwards = plugin.initial(dict(reversed(list(shapes.items()))), TASK, seed=3)
    assert all(np.array_equal(first[name], backwards[name]) for name in shapes)
    assert not np.array_equal(first["head.weight"], plugin.initial(shapes, TASK, seed=4)["head.weight"])
    assert {name: value.shape for name, value in first.items()} == shapes
    dtypes = {name: ops.dtype(x) for name, x in framework.state(network).items()}
    assert {name: str(value.dtype) for name, value in first.items()} == dtypes


def test_matrices_start_within_glorots_bound_each_of_the_three_in_one_by_itself(framework):
    plugin = ViT(ViTOptions(width=64))
    values = plugin.initial(shapes_of(framework, plugin.build(TASK)), TASK, seed=0)
    bounds = {
        "blocks.0.attention.qkv.weight": math.sqrt(6 / 128),
        "blocks.0.perceptron.inner.weight": math.sqrt(6 / 320),
        "embedding.weight": math.sqrt(6 / (48 + 64)),
    }
    for name, bound in bounds.items():
        assert 0.98 * bound < np.abs(values[name]).max() <= bound, name
    assert (values["blocks.0.norm1.weight"] == 1).all()
    assert not values["head.bias"].any()


def test_the_shipped_groups_decay_matrices_alone(framework):
    from mtrain.core.update.recipe import assign
    from mtrain.spec.config import load

    spec = load("vit_digits").spec
    names = list(framework.parameters(ViT(ViTOptions(**SMALL, pooling="token")).build(TASK)))
    without, decayed = assign(names, group_rules(spec))
    assert [options["weight_decay"] for _, options in group_rules(spec)] == [0.0, spec.optimizer.weight_decay]
    assert {"token", "positions", "norm.weight", "norm.bias", "blocks.0.norm2.weight", "head.bias"} <= set(without)
    assert all(
        name.endswith(("embedding.weight", "head.weight", "qkv.weight", "out.weight", "inner.weight", "outer.weight"))
        for name in decayed
    )


@pytest.mark.job
@under_torch
def test_the_plugin_needs_no_framework_until_it_builds():
    code = (
        "import sys, numpy as np\n"
        "from mtrain.models.vit.model import ViT\nfrom mtrain.core.interfaces import Task\n"
        "plugin = ViT(ViT.Options())\n"
        "task = Task(kind='classification', class_names=('a', 'b'), image_size=8, global_batch=2)\n"
        "plugin.prepare_task(task, {})\n"
        "plugin.initial({'head.weight': (2, 64)}, task, seed=0)\n"
        "plugin.predictions({'probabilities': np.zeros((1, 2), np.float32)}, {})\n"
        "assert not {'torch', 'paddle'} & set(sys.modules)\n"
        "try: plugin.build(task)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "UnboundError nn.Module: no framework bound: load a backend first"


@pytest.mark.parametrize("options", [{"patches": 2}, {"label_smoothing": 1.0}, {"pooling": "max"}, {"depth": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        ViTOptions(**options)


def test_sizes_that_do_not_fit_are_refused_all_at_once_with_the_nearest():
    plugin = ViT(ViTOptions(patch=3, width=64, heads=5))
    with pytest.raises(SpecError) as caught:
        plugin.prepare_task(replace(TASK, class_names=("a",)), {})
    assert "data.image_size: 8 is not a multiple of model.options.patch, 3; use 9" in caught.value.problems[0]
    assert caught.value.problems[1].endswith("model.options.heads, 5; use 65")
    assert "1 classes; a classifier needs at least two" in caught.value.problems[2]
