"""The segmentation models: sizes, loss of pixels with a class alone, shards that add up, training equal on torch and Paddle."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.core.network import noise
from mtrain.errors import SpecError
from mtrain.models.common.segmenter import HardPixels, LossOptions
from mtrain.models.liteseg.model import LiteSeg
from mtrain.models.liteseg.options import LiteSegOptions
from mtrain.models.unet.model import UNet
from mtrain.models.unet.options import UNetOptions
from tests.models.sgd import Descent, arrays
from tests.models.yolov5_small import shapes_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden_segmenters.json"
SMALL = {
    "unet": UNet(UNetOptions(width=4, depth=2, dropout=0.25)),
    "liteseg": LiteSeg(LiteSegOptions(width=8, blocks=1, decoder=(4, 6, 8))),
}
RICH = LossOptions(class_weights=(0.5, 2.0, 3.0), ohem=HardPixels(threshold=0.6), dice=0.5)
SMALL |= {
    "unet, all losses": UNet(UNetOptions(width=4, depth=2, loss=RICH)),
    "liteseg, all losses": LiteSeg(LiteSegOptions(width=8, blocks=1, decoder=(4, 6, 8), auxiliary=0.4, loss=RICH)),
}
PLAIN = ("unet", "liteseg")
TASK = Task(kind="segmentation", class_names=("none", "a", "b"), image_size=32, global_batch=4)
SIDE = 32


class Ranks:
    """Stands for the communication among ranks: the mean over ranks is given."""

    rank = 0
    size = 1

    def __init__(self, mean=None):
        self.mean = mean

    def all_reduce(self, x, op):
        assert op == "mean"
        return ops.detach(x) if self.mean is None else ops.full((), self.mean, like=x)


def network(framework, name, *, dtype="float64", mean=None):
    plugin = SMALL[name]
    built = plugin.build(TASK, Ranks(mean))
    framework.load(built, plugin.initial(shapes_of(framework, built), TASK, seed=0))
    built = framework.to(built, dtype)
    built.train()
    return built


def batch(framework, seed=0, *, keep=slice(None)):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (4, SIDE, SIDE, 4), dtype=np.uint8)
    pixels[..., 3] = rng.integers(0, 3, (4, SIDE, SIDE))
    pixels[..., :3] //= 4
    pixels[..., :3] += (pixels[..., 3] * 60)[..., None]
    pixels[0, :10, :, 3] = 255
    keys = noise.sample_keys(0, seed, np.arange(4))
    return {"pixels": framework.tensor(pixels[keep]), "random_key": framework.tensor(keys[keep])}


@pytest.mark.parametrize("name", PLAIN)
def test_training_returns_a_loss_and_evaluation_a_class_and_its_probability_for_each_pixel(framework, name):
    built = network(framework, name, dtype="float32")
    assert set(built(batch(framework))) == {"total"}
    built.eval()
    output = {key: ops.to_numpy(x) for key, x in built({"pixels": batch(framework)["pixels"]}).items()}
    assert {key: (x.dtype, x.shape) for key, x in output.items()} == dict.fromkeys(
        ("classes", "certainty"), (np.uint8, (4, SIDE, SIDE))
    )
    assert output["classes"].max() <= 2
    assert output["certainty"].min() >= 85  # the most probable of three
    one = SMALL[name].predictions(output, {})[1]
    np.testing.assert_array_equal(one["classes"], output["classes"][1])


@pytest.mark.parametrize("name", PLAIN)
def test_pixels_without_a_class_have_no_part_in_the_loss(framework, name):
    built = network(framework, name)
    first = batch(framework)
    pixels = np.array(ops.to_numpy(first["pixels"]))
    losses = []
    for fill in (0, 255):
        pixels[1:, ..., 3] = fill if fill == 255 else pixels[1:, ..., 3]
        losses.append(float(ops.to_numpy(built({**first, "pixels": framework.tensor(pixels)})["total"])))
    assert losses[0] != losses[1]
    pixels[..., 3] = 255
    nothing = built({**first, "pixels": framework.tensor(pixels)})["total"]
    assert float(ops.to_numpy(nothing)) == 0
    assert not any(x.any() for x in framework.gradients(nothing, list(framework.parameters(built).values())))


def test_the_loss_is_the_mean_cross_entropy_of_the_labelled_pixels(framework):
    from mtrain.models.common.pixel_losses import pixel_loss

    rng = np.random.default_rng(1)
    logits, pixels = rng.normal(size=(2, 3, 4, 4)), np.zeros((2, 4, 4, 4), np.uint8)
    pixels[..., 3] = rng.integers(0, 3, (2, 4, 4))
    pixels[0, 0, :, 3] = 255
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chosen = [logs[b, pixels[b, i, j, 3], i, j] for b, i, j in np.ndindex(2, 4, 4) if pixels[b, i, j, 3] != 255]
    tensors = {"pixels": framework.tensor(pixels)}
    found = pixel_loss(framework.tensor(logits), tensors, label_smoothing=0.0, collective=Ranks())
    assert float(ops.to_numpy(found)) == pytest.approx(-np.mean(chosen), rel=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_the_losses_of_shards_have_the_mean_of_the_whole(framework, name):
    """In evaluation statistics, since BatchNorm's over a shard are others; half of the pixels count on the first shard."""
    from mtrain.models.common.pixel_losses import pixel_loss
    from mtrain.models.common.pixels import normalise

    built = network(framework, name)
    built.eval()

    def loss(share, mean):
        tensors = batch(framework, keep=share)
        x = normalise(tensors["pixels"][:, :, :, :3], mean=(0.5,) * 3, std=(0.5,) * 3, dtype="float64")
        y = built.logits(x, None) if name == "unet" else ops.resize_bilinear(built.logits(x), (SIDE, SIDE))
        return float(ops.to_numpy(pixel_loss(y, tensors, label_smoothing=0.1, collective=Ranks(mean))))

    labelled = np.count_nonzero(ops.to_numpy(batch(framework)["pixels"])[..., 3] != 255)
    parts = [loss(slice(0, 1), labelled / 2), loss(slice(1, 4), labelled / 2)]
    assert np.mean(parts) == pytest.approx(loss(slice(None), None), rel=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_the_slopes_of_the_loss(framework, name):
    built, tensors = network(framework, name), batch(framework)
    parameters = framework.parameters(built)
    total = built(tensors)["total"]
    actual = dict(zip(parameters, framework.gradients(total, list(parameters.values())), strict=True))
    rng, step, values = np.random.default_rng(3), 1e-7, arrays(parameters)
    for key in list(values)[:: max(len(values) // 8, 1)]:
        direction = rng.normal(size=values[key].shape)
        ends = []
        for sign in (1, -1):
            framework.load(built, {key: values[key] + sign * step * direction})
            ends.append(float(ops.to_numpy(built(tensors)["total"])))
        framework.load(built, {key: values[key]})
        assert (actual[key] * direction).sum() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-6), (
            key
        )


def trained(framework, name, updates=10):
    built = network(framework, name)
    rule, losses = Descent(framework, built, learning_rate=0.02, momentum=0.9), []
    for update in range(updates):
        total = built(batch(framework, update % 3))["total"]
        losses.append(float(ops.to_numpy(total)))
        rule.step(total)
    return losses


@pytest.mark.parametrize("name", SMALL)
def test_ten_updates_in_float64_are_the_stored_ones_on_every_framework(framework, name):
    """The numbers were computed with torch; Paddle is held to them."""
    losses = trained(framework, name)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, json.loads(GOLDEN.read_text())[name], rtol=1e-9)


def test_pyramid_pooling_averages_every_line_once_or_in_two_neighbours(framework):
    from mtrain.models.liteseg.network import average

    x = np.random.default_rng(0).normal(size=(2, 3, 7, 5))
    found = ops.to_numpy(average(framework.tensor(x), 4))
    for i, j in np.ndindex(4, 4):
        part = x[:, :, i * 7 // 4 : -(-(i + 1) * 7 // 4), j * 5 // 4 : -(-(j + 1) * 5 // 4)]
        np.testing.assert_allclose(found[:, :, i, j], part.mean((2, 3)), rtol=1e-12)
    np.testing.assert_allclose(ops.to_numpy(average(framework.tensor(x), 1))[:, :, 0, 0], x.mean((2, 3)), rtol=1e-12)


@pytest.mark.parametrize(("name", "stride"), [("unet", 4), ("liteseg", 32)])
def test_what_does_not_fit_is_refused_with_the_nearest(name, stride):
    task = Task(kind="segmentation", class_names=("a",), image_size=33, global_batch=1)
    with pytest.raises(SpecError) as caught:
        SMALL[name].prepare_task(task, {})
    assert f"33 is not a multiple of {stride} as this model needs; use 32" in caught.value.problems[0]
    assert "1 classes; segmentation needs at least two" in caught.value.problems[1]


def image_batch(framework, *, classes=3, count=2, side=8, seed=1):
    """Return logits float64 (B, C, S, S), classes (B, S, S) with some of none, and the batch that has them."""
    rng = np.random.default_rng(seed)
    logits, pixels = 2 * rng.normal(size=(count, classes, side, side)), np.zeros((count, side, side, 4), np.uint8)
    pixels[..., 3] = rng.integers(0, classes, (count, side, side))
    pixels[0, :3, :, 3] = 255
    return logits, pixels[..., 3], {"pixels": framework.tensor(pixels)}


def entropies(logits, classes):
    """Return the cross entropy of each pixel, 0 where there is no class, (B, S, S)."""
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    known = np.where(classes == 255, 0, classes)[:, None].astype(int)
    return np.where(classes == 255, 0.0, -np.take_along_axis(logs, known, 1)[:, 0])


def value(loss):
    return float(ops.to_numpy(loss))


def test_class_weights_make_a_weighted_mean(framework):
    from mtrain.models.common.pixel_losses import pixel_loss

    logits, classes, tensors = image_batch(framework)
    table = np.array([0.5, 2.0, 3.0])
    weights = np.where(classes == 255, 0.0, table[np.where(classes == 255, 0, classes)])
    found = pixel_loss(
        framework.tensor(logits), tensors, label_smoothing=0.0, collective=Ranks(), class_weights=tuple(table)
    )
    assert value(found) == pytest.approx((entropies(logits, classes) * weights).sum() / weights.sum(), rel=1e-12)


def weighted_loss(logits, classes, weights, smoothing):
    """The cross entropy of torch's documentation: weighted targets and classes, divided by the weight of the targets."""
    weights = np.ones(logits.shape[1]) if weights is None else np.array(weights)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    rows = [(logs[b, :, i, j], classes[b, i, j]) for b, i, j in np.ndindex(classes.shape) if classes[b, i, j] != 255]
    own = sum(-weights[label] * log[label] for log, label in rows)
    spread = sum(-(weights * log).sum() for log, _ in rows)
    return ((1 - smoothing) * own + smoothing / logits.shape[1] * spread) / sum(weights[label] for _, label in rows)


WEIGHTS = {
    "none": None,
    "even": (1.0, 1.0, 1.0),
    "tiny": (2e-6, 1e-6, 5e-6),
    "below the smallest float32": (2e-60, 1e-60, 5e-60),
    "large": (3e9, 1e9, 2e9),
    "apart": (1e-7, 1.0, 1e5),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_loss_is_that_of_torch_for_weights_of_every_size(framework, name, smoothing):
    from mtrain.models.common.pixel_losses import pixel_loss

    logits, classes, tensors = image_batch(framework)
    expected = weighted_loss(logits, classes, WEIGHTS[name], smoothing)
    if framework.name == "torch":
        import torch

        labels = torch.from_numpy(classes.astype(np.int64))
        weight = None if WEIGHTS[name] is None else torch.tensor(WEIGHTS[name], dtype=torch.float64)
        published = torch.nn.functional.cross_entropy(
            torch.from_numpy(logits), labels, weight=weight, label_smoothing=smoothing, ignore_index=255
        )
        assert float(published) == pytest.approx(expected, rel=1e-12)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        found = pixel_loss(
            framework.tensor(logits.astype(dtype)),
            tensors,
            label_smoothing=smoothing,
            collective=Ranks(),
            class_weights=WEIGHTS[name] or (),
        )
        assert ops.dtype(found) == dtype
        assert value(found) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("labelled", [1, 3, 70], ids=lambda count: f"{count} pixels")
@pytest.mark.parametrize("name", ["none", "tiny", "apart"])
def test_ranks_with_uneven_numbers_of_pixels_have_the_loss_of_one_rank(framework, name, labelled):
    """Also where there are fewer pixels with a class than ranks."""
    from mtrain.models.common.pixel_losses import pixel_loss

    logits, classes, _ = image_batch(framework, count=4)
    classes = classes.copy()
    classes.reshape(-1)[labelled:] = 255
    classes.reshape(-1)[0] = 1
    pixels = np.zeros((*classes.shape, 4), np.uint8)
    pixels[..., 3] = classes
    sums = []

    class Noting(Ranks):
        def all_reduce(self, x, op):
            sums.append(value(x))
            return super().all_reduce(x, op)

    def loss(share, ranks):
        return value(
            pixel_loss(
                framework.tensor(logits[share]),
                {"pixels": framework.tensor(pixels[share])},
                label_smoothing=0.1,
                collective=ranks,
                class_weights=WEIGHTS[name] or (),
            )
        )

    shares = [slice(rank, rank + 1) for rank in range(4)]
    for share in shares:
        loss(share, Noting())
    parts = [loss(share, Ranks(np.mean(sums))) for share in shares]
    assert np.mean(parts) == pytest.approx(weighted_loss(logits, classes, WEIGHTS[name], 0.1), rel=1e-12)


@pytest.mark.parametrize(("threshold", "min_share"), [(0.3, 0.01), (0.01, 0.25), (0.01, 1.0)])
def test_hard_pixels_alone_count_where_that_is_asked_for(framework, threshold, min_share):
    from mtrain.models.common.pixel_losses import pixel_loss

    logits, classes, tensors = image_batch(framework)
    losses = entropies(logits, classes)
    kept = np.zeros(classes.shape, bool)
    for number, labelled in enumerate(classes != 255):
        chances = np.sort(np.exp(-losses[number][labelled]))
        place = min(int(min_share * labelled.size), len(chances)) - 1
        limit = max(chances[max(place, 0)], threshold)
        kept[number] = labelled & (np.exp(-losses[number]) <= limit + 1e-12)
    rule = HardPixels(threshold=threshold, min_share=min_share)
    found = pixel_loss(framework.tensor(logits), tensors, label_smoothing=0.0, collective=Ranks(), hard=rule)
    assert 0 < kept.sum() <= (classes != 255).sum()
    assert value(found) == pytest.approx(losses[kept].mean(), rel=1e-12)


def test_the_dice_loss_is_the_mean_over_images_and_classes(framework):
    from mtrain.models.common.pixel_losses import dice_loss

    logits, classes, tensors = image_batch(framework)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) * (classes != 255)[:, None]
    parts = [
        1 - (2 * chances[b, c][classes[b] == c].sum() + 1) / (chances[b, c].sum() + (classes[b] == c).sum() + 1)
        for b, c in np.ndindex(2, 3)
    ]
    assert value(dice_loss(framework.tensor(logits), tensors)) == pytest.approx(np.mean(parts), rel=1e-12)


def test_the_losses_of_shards_with_every_option_have_the_mean_of_the_whole(framework):
    from mtrain.models.common.pixel_losses import losses

    logits, _, tensors = image_batch(framework, count=4)
    rule = LossOptions(class_weights=(0.5, 2.0, 3.0), ohem=HardPixels(threshold=0.4), dice=0.7)
    options = UNetOptions(loss=rule)
    seen = []

    class Counting(Ranks):
        def all_reduce(self, x, op):
            seen.append(value(x))
            return super().all_reduce(x, op)

    def parts(share, ranks):
        tensors_here = {"pixels": tensors["pixels"][share]}
        return losses(framework.tensor(logits[share]), tensors_here, options=options, collective=ranks)

    whole = parts(slice(None), Counting())
    halves = [parts(share, Counting()) for share in (slice(0, 2), slice(2, 4))]
    mean = (seen[1] + seen[2]) / 2
    assert seen[0] == pytest.approx(2 * mean, rel=1e-12)
    halves = [parts(share, Ranks(mean)) for share in (slice(0, 2), slice(2, 4))]
    assert set(whole) == {"total", "cross_entropy", "dice"}
    for name, loss in whole.items():
        assert np.mean([value(half[name]) for half in halves]) == pytest.approx(value(loss), rel=1e-12)


def test_a_second_head_trains_and_is_not_part_of_what_evaluation_computes(framework):
    plain, plugin = SMALL["liteseg"], LiteSeg(SMALL["liteseg"].options.model_copy(update={"auxiliary": 0.4}))
    built = plugin.build(TASK, Ranks())
    shapes = shapes_of(framework, built)
    more = set(shapes) - set(shapes_of(framework, plain.build(TASK, Ranks())))
    assert more == {"auxiliary.weight", "auxiliary.bias"}
    framework.load(built, plugin.initial(shapes, TASK, seed=0))
    built = framework.to(built, "float64")
    built.train()
    losses = {name: value(loss) for name, loss in built(batch(framework)).items()}
    assert set(losses) == {"total", "cross_entropy", "auxiliary"}
    assert losses["total"] == pytest.approx(losses["cross_entropy"] + losses["auxiliary"], rel=1e-12)
    first = network(framework, "liteseg")
    assert losses["cross_entropy"] == pytest.approx(value(first(batch(framework))["total"]), rel=1e-12)


@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 2.0, 3.0, 4.0)])
def test_a_wrong_number_of_class_weights_is_refused_with_the_classes(weights):
    plugin = UNet(UNetOptions(depth=2, loss=LossOptions(class_weights=weights)))
    with pytest.raises(SpecError, match=r"class_weights: \d weights given, the data has 3 classes: none, a, b"):
        plugin.prepare_task(TASK, {})
