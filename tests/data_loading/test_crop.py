"""Centre crops and random windows are those that torchvision documents, to the byte."""

import numpy as np
import pytest
from PIL import Image

from mtrain.data.images import crop
from mtrain.data.images.crop import ATTEMPTS, centre_cropped, random_window, resize, window_of
from mtrain.data.images.geometry import MAP_DRAWS, random_map
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.section import ClassificationAugmentSpec
from mtrain.tasks.classification.source import ClassificationSource
from tests.backends.compiler import needs_a_compiler

SIZES = [(64, 48), (48, 64), (300, 37), (37, 300), (32, 32), (29, 31), (1, 90), (500, 501)]


def random_image(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def as_documented(image, side, share):
    """``Resize(round(side / share))`` and ``CenterCrop(side)`` in Pillow's own words."""
    image, short = Image.fromarray(image), round(side / share)
    width, height = image.size
    size = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(size, Image.Resampling.BILINEAR) if size != image.size else image
    left, top = round((size[0] - side) / 2.0), round((size[1] - side) / 2.0)
    return np.asarray(image.crop((left, top, left + side, top + side)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("side", "share"), [(32, 0.875), (32, 1.0), (33, 0.9), (8, 0.5)])
def test_a_centre_crop_has_the_bytes_of_pillow(size, side, share):
    image = random_image(size)
    np.testing.assert_array_equal(centre_cropped(image, side=side, share=share), as_documented(image, side, share))


@needs_a_compiler
def test_the_compiled_resize_has_the_bytes_of_pillow_for_any_part_of_an_image():
    """Pillow's first pass is sometimes the one along the columns; white shows sums that leave a byte."""
    assert crop.load_resize() is not None
    rng = np.random.default_rng(0)
    for _ in range(150):
        height, width, new_height, new_width, left = rng.integers(1, 300, 5).tolist()
        around = np.full((height, left + width + 1, 3), 255, np.uint8)
        around[:, : rng.integers(1, left + width)] = random_image((1, height))
        part = around[:, left : left + width]
        expected = Image.fromarray(np.ascontiguousarray(part)).resize(
            (new_width, new_height), Image.Resampling.BILINEAR
        )
        np.testing.assert_array_equal(resize(part, width=new_width, height=new_height), expected)


@needs_a_compiler
@pytest.mark.parametrize(
    "damage",
    [("1 - distance :", "1 - distance / 2 :"), ("HALF, HALF, HALF", "HALF, HALF, 0"), ("down_first)", "!down_first)")],
)
def test_a_compiled_resize_that_is_wrong_is_not_used(tmp_path, monkeypatch, damage):
    wrong = tmp_path / "resample.c"
    wrong.write_text(crop.SOURCE.read_text().replace(*damage))
    assert wrong.read_text() != crop.SOURCE.read_text()
    monkeypatch.setattr(crop, "SOURCE", wrong)
    assert crop.load_resize.__wrapped__() is None


def test_the_usual_224_pixels_come_from_256():
    image = random_image((640, 480))
    np.testing.assert_array_equal(centre_cropped(image, side=224, share=0.875), as_documented(image, 224, 224 / 256))


@pytest.mark.parametrize("size", SIZES)
def test_windows_lie_in_the_image_and_keep_share_and_shape(size):
    rng, scale, ratio = np.random.default_rng(1), [0.3, 0.8], [0.5, 2.0]
    area = size[0] * size[1]
    for _ in range(200):
        left, top, width, height = random_window(rng, size, scale=scale, aspect_ratio=ratio)
        assert left >= 0
        assert top >= 0
        assert 0 < width <= size[0] - left
        assert 0 < height <= size[1] - top
        if min(size) > 20 and max(size) / min(size) < 2:
            assert 0.25 < width * height / area < 0.85
            assert 0.47 < width / height < 2.13


def test_windows_of_every_place_and_size_occur():
    rng = np.random.default_rng(2)
    windows = np.array(
        [random_window(rng, (100, 100), scale=[0.08, 1], aspect_ratio=[0.75, 4 / 3]) for _ in range(3000)]
    )
    areas = windows[:, 2] * windows[:, 3] / 1e4
    assert areas.min() < 0.1
    assert areas.max() > 0.95
    ratios = np.log(windows[:, 2] / windows[:, 3])
    assert ratios.mean() == pytest.approx(0, abs=0.02)
    assert windows[:, 0].max() > 60
    assert windows[:, 1].max() > 60


def test_where_no_window_fits_the_largest_central_one_is_taken():
    class Never:
        calls = 0

        def uniform(self, low, high):
            self.calls += 1
            return high

    rng = Never()
    assert random_window(rng, (300, 30), scale=[1, 1], aspect_ratio=[0.75, 4 / 3]) == (130, 0, 40, 30)
    assert rng.calls == 2 * ATTEMPTS
    assert random_window(Never(), (30, 300), scale=[1, 1], aspect_ratio=[0.75, 0.75]) == (0, 130, 30, 40)


def test_a_training_sample_is_a_window_resized_by_pillow_and_perhaps_mirrored():
    image = random_image((50, 40), seed=3)
    split = LabelledImages(image[None], np.array([0]), ("a", "b"), ["x"])
    source = ClassificationSource(
        split, side=16, resize="crop", crop_share=0.875, augment=ClassificationAugmentSpec(), seed=9
    )
    mirrored = set()
    for epoch in range(12):
        rng = np.random.Generator(np.random.PCG64([9, epoch, 0]))
        window = random_window(rng, (50, 40), scale=[0.08, 1.0], aspect_ratio=[3 / 4, 4 / 3])
        left, top, width, height = window
        window_alone = Image.fromarray(image).crop((left, top, left + width, top + height))
        plain = np.asarray(window_alone.resize((16, 16), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(window_of(image, window, side=16), plain)
        actual = source.sample(epoch, 0).image
        is_plain, is_mirrored = np.array_equal(actual, plain), np.array_equal(actual, plain[:, ::-1])
        assert is_plain or is_mirrored
        mirrored.add(is_mirrored)
    assert mirrored == {True, False}


def test_without_a_random_window_training_has_the_centre_of_evaluation():
    image = random_image((50, 40), seed=3)
    split = LabelledImages(image[None], np.array([0]), ("a", "b"), ["x"])
    still = ClassificationAugmentSpec(random_crop=None, flip_lr=0.0)
    shape = {"side": 16, "resize": "crop", "crop_share": 0.875}
    train, val = ClassificationSource(split, **shape, augment=still), ClassificationSource(split, **shape)
    np.testing.assert_array_equal(train.sample(4, 0).image, val.sample(0, 0).image)
    np.testing.assert_array_equal(val.sample(0, 0).image, as_documented(image, 16, 0.875))


def test_whether_images_are_moved_decides_nothing_that_is_drawn_later():
    drawn, skipped = (np.random.default_rng(1) for _ in range(2))
    random_map(drawn, ClassificationAugmentSpec(degrees=1), canvas=8, side=8)
    skipped.random(MAP_DRAWS)
    assert drawn.random() == skipped.random()
