"""Every augmentation option alone does what its description says, as often and as far: 1,000 draws each.

What is measured is the sample as the network is given it. All options but one are off, so what has changed is its
doing.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.data.loader.pool import WorkerPool
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec
from mtrain.tasks.detection.source import DetectionSource

pytestmark = pytest.mark.smoke

SIDE = 64
DRAWS = 1000
OFF = dict.fromkeys(
    ("mosaic", "mosaic9", "mixup", "degrees", "translate", "scale", "shear", "perspective"), 0.0
) | dict.fromkeys(("hsv_h", "hsv_s", "hsv_v", "flip_ud", "flip_lr"), 0.0)


def source_of(folder: Path, images: list[np.ndarray], boxes: list[list[float]], **options: float) -> DetectionSource:
    """Square RGB images, one box (xywh as fractions) on each, augmented by ``options`` alone."""
    results = []
    for i, (image, box) in enumerate(zip(images, boxes, strict=True)):
        path = folder / f"{i}.png"
        cv2.imwrite(str(path), image[:, :, ::-1])
        side = len(image)
        xywh = np.array([box]) * side
        results.append(
            AnnotatedImage(
                path, path.name, i, side, side, xywh, np.zeros(1, int), np.zeros(1, bool), xywh[:, 2:].prod(1)
            )
        )
    annotations: Annotations = assemble(results, class_names=("a",), category_ids=(1,))
    source = DetectionSource(annotations, image_size=SIDE, augment=AugmentSpec(**{**OFF, **options}), seed=11)
    source.images.keep("ram", None)
    return source


def rows(folder: Path, box: list[float], **options: float) -> np.ndarray:
    """(DRAWS, 4) boxes xywh (centre) that the option makes of ``box``, as fractions of the side."""
    source = source_of(folder, [np.full((SIDE, SIDE, 3), 90, np.uint8)], [box], **options)
    actual = [source.sample(epoch, 0).targets for epoch in range(DRAWS)]
    assert {len(targets) for targets in actual} == {1}
    return np.concatenate(actual)[:, 1:].astype(float)


def assert_uniform(values: np.ndarray, low: float, high: float, *, slack: float = 0.02) -> None:
    """Inside [low, high], and spread over it evenly: a range of half or twice the width fails either."""
    from scipy import stats

    assert values.min() > low - slack * (high - low)
    assert values.max() < high + slack * (high - low)
    assert stats.kstest(values, "uniform", (low, high - low)).pvalue > 1e-4, (values.min(), values.max(), values.mean())


def assert_share(count: int, probability: float, *, of: int = DRAWS) -> None:
    from scipy import stats

    assert stats.binomtest(count, of, probability).pvalue > 1e-4, (count, of, probability)


# ------------------------------------------------------------------------------------------------------------ geometry
def test_translate_shifts_both_axes_by_up_to_its_share_of_the_side(tmp_path: Path) -> None:
    actual = rows(tmp_path, [0.45, 0.4, 0.1, 0.2], translate=0.2)
    assert_uniform(actual[:, 0] - 0.5, -0.2, 0.2)
    assert_uniform(actual[:, 1] - 0.5, -0.2, 0.2)
    assert abs(np.corrcoef(actual[:, 0], actual[:, 1])[0, 1]) < 0.15
    np.testing.assert_allclose(actual[:, 2:], [[0.1, 0.2]] * DRAWS, atol=1 / SIDE)


def test_scale_zooms_by_one_plus_or_minus_its_value(tmp_path: Path) -> None:
    actual = rows(tmp_path, [0.3, 0.3, 0.4, 0.4], scale=0.4)
    assert_uniform(actual[:, 2] / 0.4, 0.6, 1.4)
    np.testing.assert_allclose(actual[:, 2], actual[:, 3], atol=1.5 / SIDE)
    np.testing.assert_allclose(actual[:, :2], 0.5, atol=1.5 / SIDE)


def test_degrees_turns_about_the_centre_by_up_to_that_angle_either_way(tmp_path: Path) -> None:
    actual = rows(tmp_path, [0.8, 0.45, 0.1, 0.1], degrees=20.0)
    x, y = actual[:, 0] - 0.5, actual[:, 1] - 0.5
    assert_uniform(np.degrees(np.arctan2(y, x)), -20.0, 20.0)
    np.testing.assert_allclose(np.hypot(x, y), 0.35, atol=0.01)


def test_shear_leans_either_axis_by_up_to_that_angle(tmp_path: Path) -> None:
    actual = rows(tmp_path, [0.65, 0.65, 0.1, 0.1], shear=15.0)
    x, y = actual[:, 0] - 0.5, actual[:, 1] - 0.5  # x = 0.2 + tan(a) 0.2, y = 0.2 + tan(b) 0.2
    for moved in (x, y):
        assert_uniform(np.degrees(np.arctan(moved / 0.2 - 1)), -15.0, 15.0)
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.15


def test_perspective_tilts_about_either_axis_by_up_to_its_value_per_pixel(tmp_path: Path) -> None:
    at = 0.25 * SIDE  # of the box's centre from the image's, in pixels
    right = rows(tmp_path, [0.72, 0.47, 0.06, 0.06], perspective=0.001)
    low = rows(tmp_path, [0.47, 0.72, 0.06, 0.06], perspective=0.001)
    for moved in (right[:, 0], low[:, 1]):
        assert_uniform((at / ((moved - 0.5) * SIDE) - 1) / at, -0.001, 0.001, slack=0.05)


# --------------------------------------------------------------------------------------------------------------- flips
QUARTERS = np.zeros((SIDE, SIDE, 3), np.uint8)
QUARTERS[: SIDE // 2, : SIDE // 2] = (250, 0, 0)
QUARTERS[: SIDE // 2, SIDE // 2 :] = (0, 250, 0)
QUARTERS[SIDE // 2 :, : SIDE // 2] = (0, 0, 250)
"""Another colour in each corner, black in the last."""


@pytest.mark.parametrize(
    ("option", "turned", "centre"),
    [("flip_lr", np.fliplr, (0.85, 0.2)), ("flip_ud", np.flipud, (0.15, 0.8))],
)
def test_a_flip_turns_the_image_and_its_box_about_its_own_axis(
    tmp_path: Path, option: str, turned: Callable[[np.ndarray], np.ndarray], centre: tuple[float, float]
) -> None:
    source = source_of(tmp_path, [QUARTERS], [[0.1, 0.1, 0.1, 0.2]], **{option: 1.0})
    item = source.sample(0, 0)
    np.testing.assert_array_equal(item.image, turned(QUARTERS))
    np.testing.assert_allclose(item.targets[0, 1:3], centre, atol=1e-3)


@pytest.mark.parametrize(("flip_ud", "flip_lr"), [(0.2, 0.7), (0.7, 0.2)])
def test_flips_are_as_frequent_as_their_probabilities_and_independent(
    tmp_path: Path, flip_ud: float, flip_lr: float
) -> None:
    results = []
    source = source_of(tmp_path, [QUARTERS], [[0.1, 0.1, 0.1, 0.2]], flip_ud=flip_ud, flip_lr=flip_lr)
    for epoch in range(DRAWS):
        _, x, y, _, _ = source.sample(epoch, 0).targets[0]
        results.append((y > 0.5, x > 0.5))
    up_down, left_right = np.array(results).T
    assert_share(int(up_down.sum()), flip_ud)
    assert_share(int(left_right.sum()), flip_lr)
    assert_share(int((up_down & left_right).sum()), flip_ud * flip_lr)


def test_stretched_images_are_flipped_about_the_same_axes(tmp_path: Path) -> None:
    path = tmp_path / "q.png"
    cv2.imwrite(str(path), QUARTERS[:, :, ::-1])
    box = np.array([[0.1, 0.1, 0.1, 0.2]]) * SIDE
    image = AnnotatedImage(path, path.name, 1, SIDE, SIDE, box, np.zeros(1, int), np.zeros(1, bool), box[:, 2:].prod(1))
    annotations = assemble([image], class_names=("a",), category_ids=(1,))
    for option, turned in (("flip_lr", np.fliplr), ("flip_ud", np.flipud)):
        spec = AugmentSpec(**{**OFF, option: 1.0})
        item = DetectionSource(annotations, image_size=SIDE, resize="stretch", augment=spec).sample(0, 0)
        np.testing.assert_array_equal(item.image, turned(QUARTERS))


# -------------------------------------------------------------------------------------------------------------- colours
HSV = (60, 120, 120)
"""A colour far from every limit, as OpenCV counts: hue of 180, saturation and value of 255."""


@pytest.mark.parametrize(("option", "channel"), [("hsv_h", 0), ("hsv_s", 1), ("hsv_v", 2)])
def test_an_hsv_option_scales_its_own_channel_and_no_other(tmp_path: Path, option: str, channel: int) -> None:
    colour = cv2.cvtColor(np.full((SIDE, SIDE, 3), HSV, np.uint8), cv2.COLOR_HSV2RGB)
    start = cv2.cvtColor(colour, cv2.COLOR_RGB2HSV)[0, 0].astype(float)
    source = source_of(tmp_path, [colour], [[0.4, 0.4, 0.2, 0.2]], **{option: 0.5})
    pixels = [source.sample(epoch, 0).image[:1, :1] for epoch in range(DRAWS)]  # type: ignore[index]
    actual = np.array([cv2.cvtColor(pixel, cv2.COLOR_RGB2HSV)[0, 0] for pixel in pixels]).astype(float)
    assert_uniform(actual[:, channel] / start[channel], 0.5, 1.5)
    for other in {0, 1, 2} - {channel}:
        np.testing.assert_allclose(actual[:, other], start[other], atol=5)


# -------------------------------------------------------------------------------------------------------------- mosaics
COLOURS = [(30, 30, 30), (230, 30, 30), (30, 230, 30), (30, 30, 230), (230, 230, 30), (230, 30, 230), (30, 230, 230)]


def shares(folder: Path, **options: float) -> np.ndarray:
    """(DRAWS, 7) which share of a sample of image 0 shows which of seven plain images."""
    images = [np.full((SIDE, SIDE, 3), colour, np.uint8) for colour in COLOURS]
    source = source_of(folder, images, [[0.4, 0.4, 0.2, 0.2]] * len(images), **options)
    palette = np.array(COLOURS)
    actual = np.empty((DRAWS, len(COLOURS)))
    for epoch in range(DRAWS):
        image = source.sample(epoch, 0).image
        assert image is not None
        records = image[None, ::4, ::4].astype(int)
        actual[epoch] = (np.abs(records - palette[:, None, None]) < 4).all(axis=-1).mean(axis=(1, 2))
    return actual


def test_mosaic_is_as_frequent_as_its_probability(tmp_path: Path) -> None:
    alone = shares(tmp_path, mosaic=0.3)[:, 0] == 1
    # Four images of seven, or their visible part, are all image 0 once in some hundred mosaics.
    assert_share(int(alone.sum()), 0.7 + 0.3 * 0.005)


def test_mosaic9_is_its_share_of_the_mosaics(tmp_path: Path) -> None:
    """In a mosaic of nine the sample lies in the middle, so at least a quarter of what is seen is its own."""
    hidden = {share: int((shares(tmp_path, mosaic=1.0, mosaic9=share)[:, 0] < 0.24).sum()) for share in (0.0, 0.3, 1.0)}
    assert hidden[1.0] == 0
    assert hidden[0.0] > 300
    assert_share(hidden[0.3], 0.7 * hidden[0.0] / DRAWS)


def test_mixup_blends_that_share_of_the_mosaics(tmp_path: Path) -> None:
    plain = shares(tmp_path, mosaic=1.0, mixup=0.4).sum(axis=1)
    blended = int((plain < 0.9).sum())  # blends of a colour with itself stay plain
    assert_share(blended, 0.4)


def test_mixup_blends_about_halves(tmp_path: Path) -> None:
    """A black and a white image give greys near the middle: the share follows Beta(32, 32), whose deviation is
    0.062."""
    images = [np.full((SIDE, SIDE, 3), level, np.uint8) for level in (0, 255)]
    source = source_of(tmp_path, images, [[0.4, 0.4, 0.2, 0.2]] * 2, mosaic=1.0, mixup=1.0)
    greys = []
    for epoch in range(200):
        image = source.sample(epoch, 0).image
        assert image is not None
        middle = float(image[SIDE // 4, SIDE // 4, 0]) / 255
        greys += [middle] if 0.05 < middle < 0.95 else []
    assert len(greys) > 40
    assert abs(np.mean(greys) - 0.5) < 0.05
    assert 0.04 < np.std(greys) < 0.085


# ---------------------------------------------------------------------------------------------------------- multi-scale
def test_multi_scale_draws_one_side_for_each_update_from_all_multiples_of_32_in_its_range(
    annotations: Annotations,
) -> None:
    from scipy import stats

    spec = AugmentSpec(multi_scale=0.5)
    source = DetectionSource(annotations, image_size=128, augment=spec, seed=5)
    sides = np.array([[source.shape(epoch, update)[0] for update in range(100)] for epoch in range(10)])
    assert sorted(set(sides.ravel().tolist())) == [64, 96, 128, 160, 192]
    assert stats.chisquare(np.unique(sides, return_counts=True)[1]).pvalue > 1e-4
    assert (sides[0] != sides[1]).any()  # another epoch draws others
    assert source.array.shape == (192, 192, 3)
    again = DetectionSource(annotations, image_size=128, augment=spec, seed=5)
    other = DetectionSource(annotations, image_size=128, augment=spec, seed=6)
    assert [again.shape(3, update)[0] for update in range(100)] == sides[3].tolist()
    assert [other.shape(3, update)[0] for update in range(100)] != sides[3].tolist()
    plain = DetectionSource(annotations, image_size=128, augment=AugmentSpec(), seed=5)
    assert {plain.shape(epoch, update)[0] for epoch in range(3) for update in range(20)} == {128}


@pytest.mark.parametrize("options", [{"mosaic": 1.0, "mixup": 0.5}, {"mosaic": 0.0}, {"mosaic9": 1.0, "degrees": 10.0}])
def test_a_sample_of_another_side_shows_the_same_in_other_pixels(annotations: Annotations, options: dict) -> None:
    """The random draws depend on (seed, epoch, index) alone; the side of the update only sets the size."""
    spec = AugmentSpec(**{**OFF, **options, "translate": 0.1, "scale": 0.2}, sizes=[96, 192])
    source = DetectionSource(annotations, image_size=128, augment=spec, seed=5)
    sides = [source.shape(0, update)[0] for update in range(40)]
    small, large = sides.index(96), sides.index(192)
    differences = []
    for index in range(len(source)):
        one, other = (source.sample(0, index, update=update) for update in (small, large))
        assert one.image is not None
        assert other.image is not None
        assert (len(one.image), len(other.image)) == (96, 192)
        halved = cv2.resize(other.image, (96, 96), interpolation=cv2.INTER_AREA)
        differences.append(np.abs(one.image.astype(int) - halved).mean())
        if len(one.targets) == len(other.targets):  # boxes near the smallest size may be kept at one side alone
            np.testing.assert_allclose(one.targets, other.targets, atol=0.03)
    assert np.median(differences) < 12


@pytest.mark.job
def test_every_rank_and_every_split_into_micro_batches_gets_the_side_of_the_update(annotations: Annotations) -> None:
    spec = AugmentSpec(multi_scale=0.5)
    source = DetectionSource(annotations, image_size=64, augment=spec, seed=5)
    with closing(WorkerPool({"train": source}, workers=2)) as pool:
        records = {}
        for rank in (0, 1):
            loader = pool.loader(
                "train", lambda epoch, update, rank=rank: [np.array([2 * rank, 2 * rank + 1])],
                micro_batch=2, updates_per_epoch=8, epochs=1,
            )  # fmt: skip
            records[rank] = [batch["images"].shape for batch in loader.micro_batches(0)]
            loader.close()
    assert records[0] == records[1] == [(2, *source.shape(0, update)) for update in range(8)]
    assert len(set(records[0])) > 1


def test_sides_and_their_range_are_not_given_together() -> None:
    with pytest.raises(ValueError, match=r"augment\.sizes and augment\.multi_scale both set the sides"):
        DetectionDataSpec(augment=AugmentSpec(sizes=[64], multi_scale=0.5))
