"""Stretched samples: boxes stay on what they surround, an update has one size on every rank, ranges are as stated."""

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from mtrain.core.samples.sampler import Shuffled, rank_share
from mtrain.data.images.colour import YIQ, distort, drawn_distortion, random_distortion
from mtrain.data.images.section import DistortSpec
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import SpecError
from mtrain.spec.building import schema_of
from mtrain.spec.registry import Registry
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.augment.stretched import (
    METHODS,
    Stretcher,
    Window,
    centres_inside,
    crop_window,
    expand,
    shared_by_update,
)
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.evaluator import CocoEvaluator
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.inputs import StretchTraining
from mtrain.tasks.detection.section import AugmentSpec, CropSpec, DetectionDataSpec, ExpandSpec
from mtrain.tasks.detection.source import DetectionSource, open_sources
from tests.data.golden_ppyoloe.rules import photo
from tests.data_loading.rectangles import corners, ink

pytestmark = pytest.mark.smoke

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_ppyoloe" / "preprocess.npz")
SIZES = [96, 128, 160]
OFF: dict[str, Any] = {"mosaic": 0.0, "translate": 0.0, "scale": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
PLAIN = {**OFF, "flip_lr": 0.0}
EXPAND = ExpandSpec(ratio=2.0)
KINDS = {
    "plain": AugmentSpec(**PLAIN, sizes=SIZES),
    "flips": AugmentSpec(**OFF, flip_ud=0.5, sizes=SIZES),
    "expand": AugmentSpec(**OFF, expand=EXPAND, sizes=[160, 192]),
    "crop": AugmentSpec(**OFF, crop=CropSpec(), sizes=SIZES),
    "expand and crop": AugmentSpec(**OFF, expand=EXPAND, crop=CropSpec(), sizes=SIZES),
    "interpolations": AugmentSpec(**OFF, sizes=SIZES, interpolations=["nearest", "linear", "area"]),
}
OFFICIAL = AugmentSpec(
    **OFF, distort=DistortSpec(), expand=ExpandSpec(), crop=CropSpec(), sizes=SIZES, interpolations=list(METHODS)
)


def stretched(annotations: Annotations, spec: AugmentSpec, *, seed: int = 3) -> DetectionSource:
    return DetectionSource(annotations, image_size=128, resize="stretch", augment=spec, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_stay_on_what_they_surround(annotations: Annotations, kind: str) -> None:
    source, matched = stretched(annotations, KINDS[kind]), 0
    for epoch in range(8):
        for index in range(len(source)):
            item = source.sample(epoch, index, update=index)
            assert item.image is not None
            side = len(item.image)
            assert item.image.shape == source.shape(epoch, index) == (side, side, 3)
            actual, boxes = ink(item.image), corners(item.targets, side)
            for box in boxes:
                # a source pixel is several pixels wide where a crop is enlarged
                assert np.abs(actual - box).max(axis=1).min(initial=np.inf) <= 4.5, (epoch, index, box, actual)
                matched += 1
            # and nothing that is seen whole stays without a box
            for seen in actual[((actual > 3) & (actual < side - 3)).all(axis=1)]:
                assert np.abs(boxes - seen).max(axis=1).min(initial=np.inf) <= 4.5, (epoch, index, seen)
    assert matched > 100


def test_without_augmentation_the_image_is_resized_as_the_original_does(tmp_path: Path) -> None:
    image, boxes = photo()
    for name in ("linear", "nearest"):
        resized = cv2.resize(image.astype(np.float32), (96, 64), interpolation=METHODS[name])
        assert np.array_equal(resized, GOLDEN[f"{name}_float32.resized"])  # so cv2.resize is the reference
        source = stretched(one(tmp_path, image, boxes), AugmentSpec(**PLAIN, sizes=[96], interpolations=[name]))
        item = source.sample(0, 0)
        expected = cv2.resize(image.astype(np.float32), (96, 96), interpolation=METHODS[name])
        assert item.image is not None
        assert np.abs(item.image - expected).max() <= 1.0  # whole grey levels
        x = GOLDEN[f"{name}_float32.gt_bbox"][:, 0::2]
        assert corners(item.targets, 96)[:, 0::2] == pytest.approx(x, abs=2e-3)


def test_an_evaluation_image_is_the_original_one(tmp_path: Path) -> None:
    class Wide(Sizing):
        """The golden size is no square."""

        def size_for(self, size: tuple[int, int]) -> tuple[int, int]:
            return 96, 64

    image, boxes = photo()
    annotations = one(tmp_path, image, boxes)
    assert np.array_equal(
        Images(annotations.samples, Wide(96, "stretch", exact=True)).load(0), GOLDEN["eval_cubic_uint8.resized"]
    )
    item = DetectionSource(annotations, image_size=96, resize="stretch").sample(0, 0)
    assert item.image is not None
    assert np.array_equal(item.image, cv2.resize(image, (96, 96), interpolation=cv2.INTER_CUBIC))
    ratio_y, ratio_x = GOLDEN["eval_cubic_uint8.scale_factor"].tolist()
    assert item.scale_pad == pytest.approx((ratio_x, ratio_y * 96 / 64, 0.0, 0.0), rel=1e-6)
    expected = GOLDEN["eval_cubic_uint8.gt_bbox"] * [1, 96 / 64, 1, 96 / 64]
    assert corners(item.targets, 96) == pytest.approx(expected, abs=2e-3)


def one(folder: Path, image: np.ndarray, boxes_xyxy: np.ndarray) -> Annotations:
    path = folder / "photo.png"
    cv2.imwrite(str(path), image[:, :, ::-1])
    xywh = np.concatenate([boxes_xyxy[:, :2], boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]], axis=1).astype(float)
    none = np.zeros(len(xywh), dtype=bool)
    size = image.shape[1], image.shape[0]
    return assemble(
        [AnnotatedImage(path, path.name, 1, *size, xywh, np.zeros(len(xywh), int), none, xywh[:, 2:].prod(1))],
        class_names=("a",),
        category_ids=(1,),
    )


def test_a_detector_that_finds_all_scores_one_on_stretched_images(annotations: Annotations) -> None:
    spec = DetectionDataSpec(image_size=96, resize="stretch", augment=AugmentSpec(**PLAIN))
    source = open_sources(spec, None, annotations, seed=0)["val"]
    assert len({sample.width / sample.height for sample in annotations.samples}) > 3
    evaluator = CocoEvaluator(annotations)
    with closing(WorkerPool({"val": source}, workers=0)) as pool:
        loader = pool.loader("val", lambda _, u: [np.arange(4 * u, 4 * u + 4)], micro_batch=4, updates_per_epoch=3)
        for batch in loader.micro_batches(0):
            evaluator.add(batch, detections(batch, 96))
    metrics = evaluator.result([evaluator.partial()])
    assert metrics["AP"] == pytest.approx(1.0)


def detections(batch: Mapping[str, np.ndarray], side: int) -> list[np.ndarray]:
    """Return a perfect detector's boxes, found in the pixels: the left rectangle of each image is of class 0."""
    results = []
    for number in range(len(batch["images"])):
        rows = batch["targets"][batch["targets"][:, 0] == number][:, 1:]
        records = ink(batch["images"][number])
        boxes = corners(rows, side)
        assert all(np.abs(records - box).max(axis=1).min() <= 2.5 for box in boxes)
        results.append(np.concatenate([boxes, np.full((len(rows), 1), 0.9), rows[:, :1]], axis=1))
    return results


def test_a_sample_depends_on_seed_epoch_update_and_index_alone(annotations: Annotations) -> None:
    def digest(source: DetectionSource, key: tuple[int, int, int]) -> tuple[Any, ...]:
        item = source.sample(key[0], key[2], update=key[1])
        assert item.image is not None
        return item.image.shape, item.image.tobytes(), item.targets.tobytes()

    first, second = stretched(annotations, OFFICIAL, seed=1), stretched(annotations, OFFICIAL, seed=1)
    keys = [(epoch, update, index) for epoch in (0, 1) for update in range(4) for index in (0, 7)]
    same = {key: digest(first, key) for key in keys}
    assert {key: digest(second, key) for key in reversed(keys)} == same
    drawn = {(e, i, shared_by_update(OFFICIAL, image_size=128, key=(1, e, u))) for e, u, i in keys}
    assert len({value[1] for value in same.values()}) == len(drawn) > 8
    other = stretched(annotations, OFFICIAL, seed=2)
    assert all(digest(other, key) != same[key] for key in keys)


@pytest.mark.job
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_and_micro_batches_of_an_update_have_one_size(
    annotations: Annotations, size: int, workers: int
) -> None:
    order = Shuffled(len(annotations), global_batch=4, seed=0)
    reference = stretched(annotations, OFFICIAL)
    sides = []
    for rank in range(size):

        def share(epoch: int, update: int, rank: int = rank) -> list[np.ndarray]:
            return rank_share(order.global_batch_indices(epoch, update), rank=rank, size=size, accumulate=2)

        source = stretched(annotations, OFFICIAL)
        with closing(WorkerPool({"train": source}, workers=workers)) as pool:
            loader = pool.loader("train", share, micro_batch=2 // size, accumulate=2, updates_per_epoch=3, epochs=4)
            keys = [(epoch, update, number) for epoch in range(4) for update in range(3) for number in range(2)]
            batches = (batch for epoch in range(4) for batch in loader.micro_batches(epoch))
            for (epoch, update, number), batch in zip(keys, batches, strict=True):
                indices = share(epoch, update)[number].tolist()
                expected = reference.collate([reference.sample(epoch, i, update=update) for i in indices])
                assert batch["images"].shape == (len(indices), *reference.shape(epoch, update))
                assert all(np.array_equal(batch[key], expected[key]) for key in expected)
                sides.append((epoch, update, batch["images"].shape[1]))
    assert len(set(sides)) == 12  # one for each update, on all ranks
    assert {side for _, _, side in sides} == set(SIZES)


def test_every_side_and_interpolation_is_drawn_as_often() -> None:
    actual = [shared_by_update(OFFICIAL, image_size=128, key=(0, e, u)) for e in range(20) for u in range(75)]
    counts = {pair: actual.count(pair) for pair in set(actual)}
    assert set(counts) == {(side, method) for side in SIZES for method in METHODS.values()}
    assert min(counts.values()) > 60  # of 100 expected
    alone = AugmentSpec(**PLAIN)
    assert shared_by_update(alone, image_size=128, key=(0, 0, 0)) == (128, cv2.INTER_LINEAR)


BOXES = np.array([[40.0, 30, 90, 80], [100, 90, 140, 115], [5, 5, 25, 20]])
WHOLE = Window(0, 0, 160, 120)


def iou(box: np.ndarray, other: np.ndarray) -> float:
    shared = np.clip(np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2]), 0, None).prod()
    return float(shared / ((box[2:] - box[:2]).prod() + (other[2:] - other[:2]).prod() - shared))


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5])
def test_a_crop_overlaps_a_box_by_its_threshold_and_holds_a_centre(threshold: float) -> None:
    rng = np.random.default_rng(0)
    spec = CropSpec(thresholds=[threshold], allow_no_crop=False, num_attempts=400)
    moved = 0
    for _ in range(200):
        window = crop_window(rng, spec, WHOLE, BOXES)
        left, top, right, bottom = window.xyxy
        assert left >= 0
        assert top >= 0
        assert right <= 160
        assert bottom <= 120
        if window == WHOLE:
            continue
        moved += 1
        assert max(iou(window.xyxy, box) for box in BOXES) >= threshold
        assert centres_inside(window.xyxy[None], BOXES).any()
        share, aspect = window.width * window.height / (160 * 120), window.width / window.height / (160 / 120)
        assert 0.3**2 * 0.9 < share <= 1
        assert 0.5 * 0.9 < aspect < 2.0 * 1.1
    assert moved > 150


def test_a_crop_that_no_window_can_be_leaves_the_image_whole() -> None:
    rng = np.random.default_rng(0)
    tiny = np.array([[3.0, 3, 5, 5]])
    assert crop_window(rng, CropSpec(thresholds=[0.9], allow_no_crop=False), WHOLE, tiny) == WHOLE
    assert crop_window(rng, CropSpec(allow_no_crop=False), WHOLE, np.zeros((0, 4))) == WHOLE
    assert crop_window(rng, CropSpec(thresholds=[]), WHOLE, BOXES) == WHOLE
    first = [crop_window(rng, CropSpec(thresholds=[0.0]), WHOLE, BOXES) == WHOLE for _ in range(400)]
    assert 150 < sum(first) < 250  # "no crop" is one choice of two


def test_an_expansion_surrounds_the_image_within_its_ratio() -> None:
    rng = np.random.default_rng(0)
    windows = [expand(rng, ExpandSpec(), WHOLE) for _ in range(1000)]
    larger = [w for w in windows if w != WHOLE]
    assert 430 < len(larger) < 570
    ratios = np.array([w.width / 160 for w in larger])
    assert ratios.min() < 1.1
    assert 3.9 < ratios.max() <= 4
    for w in larger:
        left, top, right, bottom = w.xyxy
        assert left <= 0
        assert top <= 0
        assert right >= 160
        assert bottom >= 120
        assert w.height == pytest.approx(w.width * 120 / 160, abs=1.5)
    assert min(w.left / (w.width - 160 + 1) for w in larger) < -0.9  # anywhere


def test_around_an_expanded_image_is_the_fill_whatever_the_colours_became(annotations: Annotations) -> None:
    strong = DistortSpec(probability=1.0, contrast=[0.5, 0.6])
    spec = AugmentSpec(**PLAIN, expand=ExpandSpec(probability=1.0), distort=strong)
    for index in range(len(annotations)):
        image = stretched(annotations, spec).sample(1, index).image
        assert image is not None
        fill = (image == (124, 116, 104)).all(axis=2)
        inside = ~fill
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        image = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert fill.mean() == pytest.approx(1 - image.shape[0] * image.shape[1] / 128**2, abs=0.01)
        assert fill.any()


def test_boxes_whose_centre_a_crop_leaves_out_are_dropped(annotations: Annotations) -> None:
    crop = CropSpec(thresholds=[0.0], allow_no_crop=False)
    source = stretched(annotations, AugmentSpec(**PLAIN, crop=crop), seed=3)
    dropped = 0
    for epoch in range(10):
        for index, sample in enumerate(annotations.samples):
            rng = np.random.Generator(np.random.PCG64([3, epoch, index]))
            window = crop_window(rng, crop, Window(0, 0, sample.width, sample.height), sample.boxes.astype(float))
            inside = [
                window.left < (x1 + x2) / 2 < window.left + window.width
                and window.top < (y1 + y2) / 2 < window.top + window.height
                for x1, y1, x2, y2 in sample.boxes.tolist()
            ]
            rows = source.sample(epoch, index).targets
            assert rows[:, 0].tolist() == sample.labels[inside].tolist()
            reach = np.minimum(sample.boxes[:, 2:], window.xyxy[2:]) - np.maximum(sample.boxes[:, :2], window.xyxy[:2])
            share = reach.clip(0).prod(axis=1) / (sample.boxes[:, 2:] - sample.boxes[:, :2]).prod(axis=1)
            dropped += int((share[~np.array(inside)] > 0.15).sum())  # though much of them is seen
    assert dropped > 5


def test_targets_lie_inside_the_image(annotations: Annotations) -> None:
    source = stretched(annotations, OFFICIAL)
    rows = np.concatenate([source.sample(epoch, i, update=i).targets for epoch in range(5) for i in range(len(source))])
    edges = np.concatenate([rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2])
    assert edges.min() > -1e-6
    assert edges.max() <= 1.0
    assert (rows[:, 3:] > 0).all()


def test_a_distortion_is_its_steps_made_one_and_saturates_once() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (40, 30, 3)).astype(np.uint8)
    saved = np.eye(3, 4)
    assert np.array_equal(random_distortion(rng, DistortSpec(probability=0.0)), saved)
    for seed in range(20):
        matrix = random_distortion(np.random.default_rng(seed), DistortSpec())
        image = values.copy()
        distort(image, matrix)
        expected = np.clip(values @ matrix[:, :3].T + matrix[:, 3], 0, 255)
        assert np.abs(image - expected).max() < 1.0  # OpenCV computes in fixed point
    region = np.zeros((60, 50, 3), np.uint8)
    view = region[5:45, 7:37]
    view[...] = values
    distort(view, matrix)  # a part of a larger image
    assert np.array_equal(view, image)
    assert not region[:5].any()


def test_each_step_of_a_distortion_does_what_it_is_called() -> None:
    still: dict[str, Any] = {"hue": 0.0, "saturation": [1, 1], "contrast": [1, 1], "brightness": [0, 0]}

    def matrix(**one: Any) -> np.ndarray:
        return random_distortion(np.random.default_rng(1), DistortSpec(probability=1.0, **{**still, **one}))

    assert matrix() == pytest.approx(np.eye(3, 4), abs=1e-12)
    assert matrix(brightness=[7, 7])[:, 3] == pytest.approx([7, 7, 7])
    assert matrix(contrast=[1.5, 1.5])[:, :3] == pytest.approx(1.5 * np.eye(3))
    grey = matrix(saturation=[0, 0])[:, :3] @ [10, 200, 30]
    assert grey == pytest.approx([YIQ[0] @ [10, 200, 30]] * 3)
    turned = matrix(hue=90.0)[:, :3]
    assert not np.allclose(turned, np.eye(3))
    assert turned @ [1, 1, 1] == pytest.approx([1, 1, 1], abs=2e-3)  # grey has no hue
    assert YIQ[0] @ turned == pytest.approx(YIQ[0], abs=1e-12)  # luma stays
    drawn = [random_distortion(np.random.default_rng(s), DistortSpec(probability=0.5, **still)) for s in range(9)]
    assert np.allclose(drawn, np.eye(3, 4))


STILL: dict[str, Any] = {
    "form": "enhance",
    "hue": 0.0,
    "saturation": [1, 1],
    "contrast": [1, 1],
    "brightness": [1, 1],
}
ENHANCERS = {"brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast, "saturation": ImageEnhance.Color}


def photograph() -> np.ndarray:
    """Return smooth colours of all hues."""
    few = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    return cv2.resize(few, (96, 80), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.5])
@pytest.mark.parametrize("step", ENHANCERS)
def test_a_step_of_enhance_is_pillows(step: str, factor: float) -> None:
    spec = DistortSpec(probability=1.0, **{**STILL, step: [factor, factor]})
    image = photograph()
    expected = np.asarray(ENHANCERS[step](Image.fromarray(image)).enhance(factor)).astype(int)
    canvas = np.zeros((100, 120, 3), np.uint8)
    part = canvas[10:90, 12:108]  # a part of a larger image, as training has it
    part[...] = image
    drawn_distortion(np.random.default_rng(0), spec)(part)
    assert np.abs(part - expected).max() <= 1  # Pillow cuts fractions off
    assert np.abs(image - expected).max() > 20
    assert canvas.sum() == part.sum()


def test_the_hue_of_enhance_is_pillows_and_turns_as_far_as_it_says() -> None:
    image = photograph()
    spec, seen = DistortSpec(probability=1.0, **{**STILL, "hue": 25.3125}), set()
    for seed in range(40):
        change = drawn_distortion(np.random.default_rng(seed), spec)
        (turn,) = (value for step, value in change.keywords["steps"] if step.__name__ == "_turn_hue")  # type: ignore[attr-defined]
        hsv = np.array(Image.fromarray(image).convert("HSV"))
        hsv[:, :, 0] = (hsv[:, :, 0].astype(int) + math.floor(turn / 360 * 256)) % 256
        expected = np.asarray(Image.fromarray(hsv, mode="HSV").convert("RGB")).astype(int)
        actual = image.copy()
        change(actual)
        assert np.abs(actual - expected).mean() < 2.5  # each rounds its hue and saturation to 256 levels
        seen.add(math.floor(turn / 360 * 256))
    assert min(seen) >= -18
    assert max(seen) <= 18
    assert max(seen) - min(seen) > 25


def test_enhance_draws_order_and_steps_and_refuses_a_negative_factor() -> None:
    spec = DistortSpec(form="enhance")
    drawn = [
        tuple(step.__name__ for step, _ in drawn_distortion(np.random.default_rng(seed), spec).keywords["steps"])  # type: ignore[attr-defined]
        for seed in range(400)
    ]
    assert 1.8 < np.mean([len(steps) for steps in drawn]) < 2.2
    assert len(set(drawn)) > 40  # of 65 orders of no to four steps
    with pytest.raises(ValueError, match=r"brightness .* is a factor"):
        DistortSpec(form="enhance", brightness=[-1.0, 1.0])
    samples = [photograph() for _ in range(2)]
    for image in samples:
        drawn_distortion(np.random.default_rng(7), spec)(image)
    assert np.array_equal(*samples)


@pytest.mark.parametrize("seed", range(3))
def test_half_of_the_distortion_steps_are_taken(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = DistortSpec(hue=0.0, saturation=[1, 1], contrast=[1, 1], brightness=[1, 2])
    taken = sum(random_distortion(rng, spec)[0, 3] > 0 for _ in range(1000))
    assert 430 < taken < 570


def test_images_for_crops_are_only_reduced_where_no_crop_loses_pixels() -> None:
    sizing = Sizing(400, "crop")
    assert [sizing.reduction(size) for size in ((640, 480), (4000, 799), (1000, 800), (4000, 3200), (8000, 8000))] == [
        1,
        1,
        2,
        8,
        8,
    ]
    assert sizing.size_for((1001, 801)) == (501, 401)
    source = DetectionSource(
        assemble([], class_names=("a",), category_ids=(1,)), image_size=640, resize="stretch", augment=OFFICIAL
    )
    assert source.array.shape == (160, 160, 3)


def test_a_large_image_keeps_the_pixels_of_its_narrowest_crop(tmp_path: Path) -> None:
    annotations = one(tmp_path, np.zeros((700, 700, 3), np.uint8), np.array([[10.0, 10, 600, 600]]))
    for crop, kept in ((None, 88), (CropSpec(scaling=[0.5, 1.0], aspect_ratio=[1.0, 1.0]), 175)):
        view = StretchTraining(annotations.samples, AugmentSpec(**PLAIN, crop=crop), side=64, seed=0)
        assert view.images.load(0).shape[0] == kept
    # Half of the area's root at an aspect of 4 is a quarter of the width: 64 pixels of 256.
    narrow = AugmentSpec(**PLAIN, crop=CropSpec(scaling=[0.5, 1.0], aspect_ratio=[0.25, 4.0]))
    assert StretchTraining(annotations.samples, narrow, side=64, seed=0).images.load(0).shape[0] == 350


def test_a_large_jpeg_keeps_its_boxes_when_it_is_decoded_smaller(tmp_path: Path) -> None:
    ground = cv2.resize(np.random.default_rng(0).integers(70, 160, (5, 6, 3)).astype(np.uint8), (1201, 901))
    box = np.array([[401.0, 300, 700, 611]])
    ground[300:611, 401:700] = (250, 20, 20)
    annotations = one(tmp_path, ground, box)
    path = annotations.samples[0].path
    cv2.imwrite(str(path.with_suffix(".jpg")), ground[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    path.with_suffix(".jpg").replace(path)  # first bytes say what a file is
    images = Images(annotations.samples, Sizing(200, "crop"))
    assert images.load(0).shape == (226, 301, 3)
    out = np.empty((128, 128, 3), np.uint8)
    spec = AugmentSpec(**PLAIN, crop=CropSpec(thresholds=[0.1], allow_no_crop=False))
    for seed in range(10):
        rows = Stretcher(images, spec).draw(np.random.default_rng(seed), 0, out, method=cv2.INTER_LINEAR)
        assert np.abs(corners(rows, 128) - ink(out)).max() <= 4.5


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"resize": "stretch"},
            r"resize is stretch.*augment\.mosaic, augment\.translate, augment\.scale; set them to 0",
        ),
        (
            {"augment": {"distort": {}}},
            r"resize is letterbox.*augment\.distort; leave them out, or take resize: stretch",
        ),
        ({"augment": {"crop": {}, "interpolations": ["cubic"]}}, r"augment\.crop, augment\.interpolations"),
        ({"augment": {"sizes": [320, 330]}}, "given 330, expected a multiple of 32; use 320"),
        ({"augment": {"crop": {"scaling": [0.9, 0.3]}}}, r"\[0\.9, 0\.3\], expected \[smallest, largest\]"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(data: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, SpecError), match=words):
        schema_of("detection", registry=Registry.read()).model_validate({"data": data})


def test_the_contrast_of_enhance_is_that_of_the_whole_image_though_a_part_of_it_is_seen(tmp_path, monkeypatch) -> None:
    image = photograph()
    image[:, 48:] //= 4  # dark, and outside of the window
    cv2.imwrite(str(path := tmp_path / "0.png"), image[:, :, ::-1])
    box = np.array([[0.0, 0.0, 96.0, 80.0]])
    annotated = AnnotatedImage(path, "0.png", 0, 96, 80, box, np.zeros(1, int), np.zeros(1, bool), np.array([7680.0]))
    annotations = assemble([annotated], class_names=("a",), category_ids=(1,))
    monkeypatch.setattr("mtrain.tasks.detection.augment.stretched.crop_window", lambda *given: Window(4, 8, 40, 60))
    distort = DistortSpec(probability=1.0, **{**STILL, "contrast": [0.5, 0.5], "brightness": [1.2, 1.2]})
    changed = []
    for order in ("Contrast", "Brightness"), ("Brightness", "Contrast"):
        factors, whole = {"Contrast": 0.5, "Brightness": 1.2}, Image.fromarray(image)
        for name in order:
            whole = getattr(ImageEnhance, name)(whole).enhance(factors[name])
        changed.append(cv2.resize(np.asarray(whole)[8:68, 4:44], (96, 96), interpolation=cv2.INTER_LINEAR).astype(int))
    spec = AugmentSpec(**PLAIN, sizes=[96], distort=distort, crop=CropSpec())
    nearest = set()
    for seed in range(8):
        source = DetectionSource(annotations, image_size=96, resize="stretch", augment=spec, seed=seed)
        seen = source.sample(0, 0).image
        assert seen is not None
        differences = [np.abs(seen - one).max() for one in changed]
        assert min(differences) <= 3  # roundings of each step
        nearest.add(int(np.argmin(differences)))
    assert nearest == {0, 1}, "both orders were drawn"


@pytest.mark.parametrize("flips", [0.0, 1.0])
@pytest.mark.parametrize(
    ("resize", "trained", "edge"),
    [("stretch", True, 0.0), ("stretch", False, 0.0), ("letterbox", True, 1e-3), ("letterbox", False, 1e-3)],
)
def test_a_box_at_the_border_ends_where_the_models_own_program_ends_it(tmp_path, resize, trained, edge, flips) -> None:
    """PaddleDetection's and RT-DETR's at the border of the image, YOLOv5's 1e-3 pixels before the right and lower one."""
    side = 64
    cv2.imwrite(str(path := tmp_path / "0.png"), np.full((side, side, 3), 90, np.uint8))
    corners = np.array([[16.0, 24.0, 64.0, 64.0], [0.0, 0.0, 64.0, 64.0], [0.0, 0.0, 32.0, 16.0]])
    xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    labels, crowds = np.arange(3), np.zeros(3, bool)
    annotated = AnnotatedImage(path, "0.png", 0, side, side, xywh, labels, crowds, xywh[:, 2:].prod(1))
    annotations = assemble([annotated], class_names=("a", "b", "c"), category_ids=(1, 2, 3))
    spec = AugmentSpec(**{**PLAIN, "flip_lr": flips, "flip_ud": flips}) if trained else None
    source = DetectionSource(annotations, image_size=side, resize=resize, augment=spec)
    flipped = corners if not trained or not flips else side - corners[:, [2, 3, 0, 1]]
    ended = np.clip(flipped, 0, side - edge)
    expected = np.concatenate([(ended[:, :2] + ended[:, 2:]) / 2, ended[:, 2:] - ended[:, :2]], axis=1) / side
    targets = source.sample(0, 0).targets
    assert targets[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(targets[:, 1:], expected.astype(np.float32))
