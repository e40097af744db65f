"""Augmented samples: boxes stay on what they surround, randomness is a function of the key, ranges are as stated."""

import cv2
import numpy as np
import pytest

from mtrain.data.images.colour import scale_hsv
from mtrain.data.images.fast_decode import decode_quickly
from mtrain.data.images.geometry import fitted_size, is_upright, map_boxes, random_map, survives
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.augment import mosaic
from mtrain.tasks.detection.augment.render import Renderer
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.section import AugmentSpec
from mtrain.tasks.detection.source import DetectionSource
from tests.data_loading.rectangles import corners, ink

SIDE = 128
PLAIN = {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
KINDS = {
    "mosaic of four": AugmentSpec(**PLAIN, scale=0.3),
    "mosaic of nine": AugmentSpec(**PLAIN, mosaic9=1.0, scale=0.2),
    "letterbox": AugmentSpec(**PLAIN, mosaic=0.0),
    "flips": AugmentSpec(**PLAIN, flip_ud=0.5, flip_lr=0.5, scale=0.2),
    "rotation": AugmentSpec(**PLAIN, degrees=45.0, scale=0.2, flip_ud=0.5),
    "shear": AugmentSpec(**PLAIN, shear=20.0, scale=0.2),
    "perspective": AugmentSpec(**PLAIN, perspective=0.001, scale=0.2),
    "rotated letterbox": AugmentSpec(**PLAIN, mosaic=0.0, degrees=30.0),
}
TURNED = {"rotation", "shear", "perspective", "rotated letterbox"}


def fitted_sizes(annotations: Annotations):
    return lambda index: fitted_size(annotations.samples[index].width, annotations.samples[index].height, SIDE)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_stay_on_what_they_surround(annotations: Annotations, kind: str) -> None:
    source = DetectionSource(annotations, image_size=SIDE, augment=KINDS[kind], seed=3)
    matched = 0
    for epoch in range(6):
        for index in range(len(source)):
            item = source.sample(epoch, index)
            assert item.image is not None
            actual, boxes = ink(item.image), corners(item.targets, SIDE)
            for box in boxes:
                if TURNED & {kind} and (box.min() < 1 or box.max() > SIDE - 1):
                    continue  # the box of a turned rectangle, then cut, is larger than what is left to see
                distance = np.abs(actual - box).max(axis=1).min(initial=np.inf)
                assert distance <= 2.5, (epoch, index, box, actual)
                matched += 1
            # and nothing large stays without a box
            for seen in actual[(actual[:, 2:] - actual[:, :2] > 12).all(axis=1)]:
                inside = ((seen > 3) & (seen < SIDE - 3)).all()
                assert not inside or np.abs(boxes - seen).max(axis=1).min(initial=np.inf) <= 2.5, (epoch, index, seen)
    assert matched > 60


@pytest.mark.parametrize("spec", [AugmentSpec(mixup=0.5, mosaic9=0.5), AugmentSpec(mosaic=0.5, degrees=10.0)])
def test_a_sample_depends_on_seed_epoch_and_index_alone(annotations: Annotations, spec: AugmentSpec) -> None:
    def make(seed: int) -> DetectionSource:
        return DetectionSource(annotations, image_size=SIDE, augment=spec, seed=seed)

    def digest(source: DetectionSource, epoch: int, index: int) -> tuple[bytes, bytes]:
        item = source.sample(epoch, index)
        assert item.image is not None
        return item.image.tobytes(), item.targets.tobytes()

    first, second = make(1), make(1)
    second.sample(4, 5)  # what was drawn before leaves no trace
    keys = [(epoch, index) for epoch in (0, 1) for index in (0, 7)]
    same = {key: digest(first, *key) for key in keys}
    assert {key: digest(second, *key) for key in reversed(keys)} == same
    assert len(set(same.values())) == len(keys)
    assert digest(make(2), 0, 0) != same[0, 0]


def test_a_mosaic_holds_its_own_sample_and_mixup_the_boxes_of_two(annotations: Annotations) -> None:
    size_of = fitted_sizes(annotations)
    rng = np.random.default_rng(0)
    assert mosaic.nine([4, 1, 1, 2, 3, 0, 0, 5, 6], size_of, SIDE, rng).placements[0].index == 4
    one = AugmentSpec(translate=0.0, scale=0.0)
    single = DetectionSource(annotations, image_size=SIDE, augment=one)
    mixed = DetectionSource(annotations, image_size=SIDE, augment=one.model_copy(update={"mixup": 1.0}))
    counts = [sum(len(s.sample(0, i).targets) for i in range(12)) for s in (single, mixed)]
    assert 1.5 * counts[0] < counts[1] < 2.7 * counts[0]


@pytest.mark.parametrize("layout_of", [mosaic.four, mosaic.nine])
def test_images_of_a_layout_never_overlap(annotations: Annotations, layout_of) -> None:
    size_of = fitted_sizes(annotations)
    rng = np.random.default_rng(0)
    for _ in range(50):
        indices = rng.integers(12, size=4 if layout_of is mosaic.four else 9).tolist()
        layout = layout_of(indices, size_of, SIDE, rng)
        covered = np.zeros((6 * SIDE, 6 * SIDE), dtype=int)
        for p in layout.placements:
            x, y = p.left + 2 * SIDE, p.top + 2 * SIDE
            covered[y : y + p.height, x : x + p.width] += 1
        assert covered.max() == 1


def test_the_direct_way_draws_what_the_warped_canvas_shows(annotations: Annotations) -> None:
    images = Images(annotations.samples, Sizing(SIDE, "layout"))
    renderer, rng = Renderer(images), np.random.default_rng(0)
    spec = AugmentSpec(scale=0.4)
    for _ in range(30):
        layout = mosaic.four(rng.integers(12, size=4).tolist(), fitted_sizes(annotations), SIDE, rng)
        matrix, zoom = random_map(rng, spec, canvas=2 * SIDE, side=SIDE)
        assert is_upright(matrix)
        nearly = matrix.copy()
        nearly[0, 1] = 1e-9  # no longer upright: the canvas is warped
        direct, warped = (np.empty((SIDE, SIDE, 3), dtype=np.uint8) for _ in range(2))
        boxes, labels = renderer.draw(layout, matrix, zoom, direct)
        others, other_labels = renderer.draw(layout, nearly, zoom, warped)
        difference = np.abs(direct.astype(int) - warped.astype(int))
        assert np.median(difference) <= 2
        assert difference.mean() < 5  # edges may lie half a pixel elsewhere
        pairs = [(box, others[other_labels == label]) for box, label in zip(boxes, labels, strict=True)]
        near = [np.abs(same - box).max(axis=1).min(initial=9) for box, same in pairs]
        assert sum(distance > 1.5 for distance in near) <= 1  # one box may be at the limit of what is kept


def test_no_mosaic_in_the_last_epochs(annotations: Annotations) -> None:
    def make(spec: AugmentSpec, epochs: int | None) -> DetectionSource:
        return DetectionSource(annotations, image_size=SIDE, augment=spec, epochs=epochs)

    closing = make(AugmentSpec(close_mosaic_epochs=2), 5)
    always, never = make(AugmentSpec(), None), make(AugmentSpec(mosaic=0.0), None)
    image = [[source.sample(epoch, 1).image for epoch in range(5)] for source in (closing, always, never)]
    assert all(np.array_equal(image[0][e], image[1][e]) for e in (0, 1, 2))
    assert all(np.array_equal(image[0][e], image[2][e]) for e in (3, 4))
    assert not any(np.array_equal(image[1][e], image[2][e]) for e in range(5))


@pytest.mark.parametrize(
    "gains", [(1.015, 0.4, 1.3), (0.985, 1.6, 0.7), (1.4, 1.0, 1.0), (1.9, 1.2, 0.9), (1.0, 1.0, 1.0)]
)
def test_hsv_gains_are_those_of_lookup_tables(gains: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(0)
    image = cv2.resize(rng.integers(0, 256, (20, 20, 3)).astype(np.uint8), (300, 500), interpolation=cv2.INTER_CUBIC)
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    x = np.arange(256)
    hue = (np.rint(x * gains[0]) % 180).astype(np.uint8)
    others = [np.clip(np.rint(x * g), 0, 255).astype(np.uint8) for g in gains[1:]]
    planes = [table[hsv[:, :, i]] for i, table in enumerate([hue, *others])]
    expected = cv2.cvtColor(np.stack(planes, axis=2), cv2.COLOR_HSV2RGB)
    scale_hsv(image, gains)
    difference = np.abs(image.astype(int) - expected.astype(int))
    # Ties round either way, and the table for large hues truncates: one step of hue is up to 9 levels.
    assert difference.max() <= 9
    assert difference.mean() < (0.05 if gains[0] < 1.42 else 1.5)


def test_quick_decoding_is_close_to_exact_decoding(annotations: Annotations) -> None:
    path = annotations.samples[3].path
    assert path.suffix == ".jpg"
    exact = cv2.imread(str(path))[:, :, ::-1].astype(int)
    whole, half = decode_quickly(path), decode_quickly(path, reduce=2)
    assert whole is not None
    assert half is not None
    assert np.abs(whole.astype(int) - exact).mean() < 2.5
    assert half.shape == (-(-exact.shape[0] // 2), -(-exact.shape[1] // 2), 3)
    assert decode_quickly(annotations.samples[0].path) is None


def test_boxes_that_are_too_small_too_thin_or_mostly_gone_do_not_survive() -> None:
    before = np.array([[0, 0, 10, 10.0]] * 3 + [[0, 0, 300, 3.0], [0, 0, 10, 10]])
    after = np.array([[0, 0, 10, 10], [0, 0, 2, 10], [0, 0, 3, 3], [0, 0, 300, 2.5], [0, 0, 4, 4.0]])
    assert survives(before, after).tolist() == [True, False, False, False, True]


def test_a_box_beyond_the_horizon_has_no_image() -> None:
    matrix = np.array([[1.0, 0, 0], [0, 1, 0], [-0.01, 0, 1]])
    boxes = map_boxes(np.array([[10.0, 10, 20, 20], [90, 10, 110, 20]]), matrix)
    assert boxes[0, 2] == pytest.approx(25.0)
    assert not boxes[1].any()


def test_targets_lie_inside_the_image(annotations: Annotations) -> None:
    source = DetectionSource(annotations, image_size=SIDE, augment=AugmentSpec(scale=0.8, translate=0.5, mixup=0.5))
    rows = np.concatenate([source.sample(e, i).targets for e in range(4) for i in range(12)])
    edges = np.concatenate([rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2])
    assert edges.min() > -1e-6
    assert edges.max() < 1.0
    assert (rows[:, 3:] > 0).all()
