"""PP-YOLOE+ computes what the published code computes, on either framework; what differs from PP-YOLOE is tested here."""

import json

import numpy as np
import pytest

from mtrain.core.collective import OneRank
from tests.models.ppyoloe_golden import (
    RULES,
    Job,
    assert_close,
    assert_rows_close,
    is_counter,
    plugin,
    published,
    stored,
    summary_row,
    task,
)

EXACT = 1e-7


@pytest.fixture(autouse=True)
def one_thread(framework):
    framework.one_thread()


@pytest.fixture(scope="module")
def expected():
    return stored("plus/s_nc3_64x64")


def job_of(framework, *, training):
    job = Job.filled(framework, "s", 3, plus=True)
    names = [name for name in framework.state(job.network) if name.endswith(".alpha")]
    # Positive ones: the published code takes a factor of 0 or below for 1, since Paddle's tensors are true where they are
    # above 0. Trained factors are near 1.
    framework.load(job.network, {name: np.float32(0.5 + RULES.uniform(name, (1,))) for name in names})
    job.mode(training=training)
    return job


def test_names_and_shapes_are_those_of_the_published_model(framework, expected):
    network = plugin("s", plus=True).build(task(3), OneRank())
    state = {published(name): tuple(x.shape) for name, x in framework.state(network).items() if not is_counter(name)}
    shapes = [tuple(json.loads(shape)) for shape in expected["state_shapes"]]
    assert list(state.items()) == list(zip(expected["state_names"].tolist(), shapes, strict=True))
    factors = [name for name in state if name.endswith(".alpha")]
    assert len(factors) == 6
    assert set(factors) <= set(framework.parameters(network))


def test_predictions_are_those_of_the_published_model(framework, expected):
    job = job_of(framework, training=False)
    with framework.nn.no_grad():
        outputs, _ = job.network.outputs(job.image(64, 64))
    logits = framework.ops.to_numpy(outputs.logits_BLC)
    assert_close(1 / (1 + np.exp(-logits)).transpose(0, 2, 1), expected["scores"], EXACT, "scores")
    bins = framework.ops.to_numpy(outputs.distances_BLSK)
    shares = np.exp(bins - bins.max(axis=-1, keepdims=True))
    distances = (shares / shares.sum(axis=-1, keepdims=True)) @ np.arange(17.0)
    assert_close(distances, expected["reg_dist"], EXACT, "distances")


def test_losses_and_gradients_are_those_of_the_published_model(framework, expected):
    job = job_of(framework, training=True)
    losses = job.losses(job.image(64, 64), job.truth(64, 64, 3, "normal"), static=False)
    np.testing.assert_allclose(job.numbers(losses), expected["losses"], rtol=EXACT)
    gradients = {published(name): value for name, value in job.gradients(losses["total"]).items()}
    names = expected["grad_names"].tolist()
    assert sorted(gradients) == sorted(names)
    rows = np.array([summary_row(name, gradients[name]) for name in names])
    largest = expected["grad_summary"][:, 0].max()
    assert_rows_close(names, rows, expected["grad_summary"], EXACT, floor=1e-3 * largest)
    factors = [summary_row(name, gradients[name]) for name in names if name.endswith(".alpha")]
    assert min(abs(norm) for norm, _, _ in factors) > 1e-6 * largest  # a factor without a gradient would fit any number


def test_pixels_are_divided_by_255_and_no_more(framework):
    network = framework.to(plugin("s", plus=True).build(task(3), OneRank()), "float64")
    pixels = np.arange(2 * 32 * 32 * 3).reshape(2, 32, 32, 3) % 256
    prepared = framework.ops.to_numpy(network.as_input(framework.tensor(pixels.astype(np.uint8), "uint8")))
    np.testing.assert_allclose(prepared, pixels.transpose(0, 3, 1, 2) / 255, rtol=1e-15)


def test_the_form_for_inference_sees_the_same(framework):
    job = job_of(framework, training=False)
    arrays = {name: np.array(framework.ops.to_numpy(x)) for name, x in framework.state(job.network).items()}
    weights = plugin("s").fused(arrays)
    network = framework.to(plugin("s", plus=True, deploy=True).build(task(3), OneRank()), "float64")
    assert list(framework.state(network)) == list(weights)
    framework.load(network, weights)
    network.eval()
    image = job.image(64, 64)
    with framework.nn.no_grad():
        before, after = (framework.ops.to_numpy(x.outputs(image)[0].logits_BLC) for x in (job.network, network))
    assert_close(after, before, 1e-9, "logits")


def test_factors_start_at_one(framework):
    model = plugin("s", plus=True)
    network = model.build(task(3), OneRank())
    shapes = {name: tuple(x.shape) for name, x in framework.state(network).items()}
    start = model.initial(shapes, task(3), seed=3)
    assert all((value == 1).all() for name, value in start.items() if name.endswith(".alpha"))


@pytest.mark.parametrize(("factors", "count"), [("none", 0), ("everywhere", 11)])
def test_factors_can_be_elsewhere_and_the_form_for_inference_has_them_in_its_kernels(factors, count, framework):
    built = plugin("s", plus=True, factors=factors).build(task(3), OneRank())
    network = framework.to(built, "float64")
    shapes = {name: tuple(x.shape) for name, x in framework.state(network).items() if not is_counter(name)}
    filled = {name: RULES.fill(published(name), shape, "s") for name, shape in shapes.items()}
    alphas = [name for name in shapes if name.endswith(".alpha")]
    assert len(alphas) == count
    filled |= {name: np.float32(0.5 + RULES.uniform(name, (1,))).reshape(shapes[name]) for name in alphas}
    framework.load(network, filled)
    network.eval()
    weights = plugin("s").fused(
        {name: np.array(framework.ops.to_numpy(x)) for name, x in framework.state(network).items()}
    )
    deployed = framework.to(plugin("s", plus=True, factors=factors, deploy=True).build(task(3), OneRank()), "float64")
    assert list(framework.state(deployed)) == list(weights)
    framework.load(deployed, weights)
    deployed.eval()
    image = framework.tensor(RULES.image(64, 64), "float64")
    with framework.nn.no_grad():
        before, after = (framework.ops.to_numpy(x.outputs(image)[0].logits_BLC) for x in (network, deployed))
    assert_close(after, before, 1e-9, "logits")
    framework.load(network, {name: np.full(shapes[name], 3.0, np.float32) for name in alphas})
    with framework.nn.no_grad():
        changed = framework.ops.to_numpy(network.outputs(image)[0].logits_BLC)
    assert (np.abs(changed - before).max() > 1e-6) == bool(count)
