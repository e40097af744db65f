"""Residual networks: the metrics of plain torch networks in float64 under every framework, counts, names, start values."""

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.errors import SpecError
from mtrain.models.resnet.model import ResNet18, ResNet34, ResNet50, ResNetOptions
from mtrain.spec import plugins
from mtrain.weights.outline import Question, outlines
from tests.models import resnet_golden as golden
from tests.models.sgd import Descent, arrays
from tests.models.yolov5_small import shapes_of
from tests.selection import quick, under_torch

PLUGINS = {"18": ResNet18, "34": ResNet34, "50": ResNet50}
TASK = Task(kind="classification", class_names=tuple("0123456789"), image_size=golden.SIDE, global_batch=2)
STORED = json.loads(golden.FILE.read_text())


def filled(framework, variant, **options):
    network = PLUGINS[variant](ResNetOptions(**options)).build(TASK)
    framework.load(network, {name: golden.fill(name, shape) for name, shape in shapes_of(framework, network).items()})
    return framework.to(network, "float64")


def metrics_of(framework, network):
    """The metrics that the golden file has, of a network of mtrain."""
    # Loading casts to float32; the metrics belong to the values in float64.
    framework.load(network, {name: golden.fill(name, shape) for name, shape in shapes_of(framework, network).items()})
    batch = {name: framework.tensor(array) for name, array in golden.batch().items()}
    network.eval()
    logits = ops.to_numpy(network.logits(network.pixels(batch["images"])))
    network.train()
    total = network(batch)["total"]
    parameters = framework.parameters(network)
    gradients = dict(zip(parameters, framework.gradients(total, list(parameters.values())), strict=True))
    return golden.metrics(logits, float(ops.to_numpy(total)), gradients, arrays(framework.state(network)))


@pytest.mark.parametrize("variant", quick(PLUGINS, everywhere=["18"], torch=["50"]))
def test_a_network_has_the_metrics_of_the_plain_torch_network(framework, variant):
    actual, expected = metrics_of(framework, filled(framework, variant)), STORED[variant]
    largest = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(actual["logits"], expected["logits"], rtol=0, atol=1e-9 * max(largest, 1))
    assert actual["total"] == pytest.approx(expected["total"], abs=1e-9)
    for part in ("gradients", "statistics"):
        assert list(actual[part]) == list(expected[part])
        for name, (norm, product) in expected[part].items():
            assert actual[part][name] == pytest.approx((norm, product), abs=1e-9 * max(norm, 1)), (part, name)


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
        "resnet50": 25_557_032,
        "vit_tiny": 5_717_416,
        "vit_small": 22_050_664,
        "vit_base": 86_567_656,
    }.items(),
)
@under_torch
def test_networks_for_1000_classes_have_the_published_numbers_of_parameters(framework, name, count):
    task = Task(kind="classification", class_names=tuple(map(str, range(1000))), image_size=224, global_batch=2)
    plugin = plugins.load("models", name)()
    plugin.prepare_task(task, {})
    sizes = {key: math.prod(ops.shape(x)) for key, x in framework.parameters(plugin.build(task)).items()}
    assert sum(sizes.values()) == count


@under_torch
def test_the_outline_without_a_framework_lists_torchvisions_names():
    question = Question(model="resnet50", classes=1000, options={}, policy=None)
    (outline,) = outlines([question])
    names = list(outline)
    norm = [f"bn1.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert names[:7] == ["conv1.weight", *norm, "layer1.0.conv1.weight"]
    assert {"layer1.0.downsample.0.weight", "layer1.0.downsample.1.running_var", "layer4.2.bn3.bias"} <= set(names)
    assert len(names) == 320
    assert (outline["fc.weight"].shape, outline["layer4.0.downsample.0.weight"].shape) == (
        (1000, 2048),
        (2048, 1024, 1, 1),
    )


def test_start_values_depend_on_seed_and_name_alone(framework):
    plugin = ResNet18()
    shapes = shapes_of(framework, plugin.build(TASK))
    first, backwards = (
        plugin.initial(shapes, TASK, seed=3),
        plugin.initial(dict(reversed(shapes.items())), TASK, seed=3),
    )
    assert all(np.array_equal(first[name], backwards[name]) for name in shapes)
    assert not np.array_equal(first["conv1.weight"], plugin.initial(shapes, TASK, seed=4)["conv1.weight"])
    weight = first["layer4.1.conv2.weight"]
    assert weight.std() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert np.abs(first["fc.weight"]).max() <= 1 / math.sqrt(512)
    assert (first["bn1.weight"] == 1).all()
    assert (first["bn1.running_var"] == 1).all()
    assert not first["bn1.running_mean"].any()
    assert not first["fc.bias"].any()
    zeroed = ResNet18(ResNetOptions(zero_last_norm=True)).initial(shapes, TASK, seed=3)
    assert [name for name in shapes if not zeroed[name].any() and first[name].any()] == [
        f"layer{stage}.{block}.bn2.weight" for stage in range(1, 5) for block in range(2)
    ]


def test_training_steps_lower_the_loss(framework):
    plugin = ResNet18()
    network = plugin.build(TASK)
    framework.load(network, plugin.initial(shapes_of(framework, network), TASK, seed=0))
    network.train()
    batch = {name: framework.tensor(array) for name, array in golden.batch().items()}
    rule, totals = Descent(framework, network, learning_rate=0.01, momentum=0.9), []
    for _ in range(5):
        losses = network(batch)
        rule.step(losses["total"])
        totals.append(float(ops.to_numpy(losses["total"])))
    assert set(losses) == {"total"}
    assert totals[-1] < 0.3 * totals[0]


def test_pixels_are_normalised_by_the_options_and_labels_smoothed(framework):
    network = filled(framework, "18", mean=[0.5, 0.25, 0.0], std=[0.5, 1.0, 2.0], label_smoothing=0.1)
    images = golden.batch()["images"]
    pixels = ops.to_numpy(network.pixels(framework.tensor(images)))
    expected = ((images / 255 - [0.5, 0.25, 0.0]) / [0.5, 1.0, 2.0]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(pixels, expected, atol=1e-15)
    batch = {name: framework.tensor(array) for name, array in golden.batch().items()}
    network.train()
    logits = ops.to_numpy(network.logits(network.pixels(batch["images"])))
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    target = np.eye(10)[golden.batch()["labels"]] * 0.9 + 0.01
    assert float(ops.to_numpy(network(batch)["total"])) == pytest.approx(-(target * logs).sum(1).mean(), rel=1e-10)


@pytest.mark.parametrize("options", [{"std": [0, 1, 1]}, {"mean": [1, 2]}, {"label_smoothing": 1.0}, {"depth": 18}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        ResNetOptions(**options)


def test_one_class_is_refused():
    with pytest.raises(SpecError, match="1 classes; a classifier needs at least two"):
        ResNet18().prepare_task(Task(kind="classification", class_names=("a",), image_size=64, global_batch=2), {})
