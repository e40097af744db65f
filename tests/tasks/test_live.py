"""Images in memory become the samples with which a task evaluates, and predictions become rows."""

import cv2
import numpy as np
import pytest

import mtrain
from mtrain.data.images import crop
from mtrain.data.images.decode import decode
from mtrain.spec.resolved import Resolved

NAMES = ("a", "b", "c")
CONFIGS = {"detection": "digits", "classification": "vit_digits", "segmentation": "unet_digits"}
WAYS = [
    (task, resize)
    for task in CONFIGS
    for resize in ("letterbox", "stretch", "crop")
    if resize != "crop" or task == "classification"
]
SIZES = [(97, 41), (20, 300), (64, 64), (1, 1), (900, 1), (640, 480)]


def opened(task, resize="letterbox", side=64):
    values = {"data.image_size": side, "data.resize": resize}
    if (task, resize) == ("detection", "stretch"):
        values |= {"data.augment.mosaic": 0, "data.augment.translate": 0, "data.augment.scale": 0}
    spec = mtrain.load_spec(CONFIGS[task], overrides=values).spec
    return Resolved.of(spec).task_named(task), spec


@pytest.mark.parametrize(("task", "resize"), WAYS)
def test_samples_equal_those_of_files(task, resize, tmp_path):
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{number}.png" for number in range(len(SIZES))]
    for file, (width, height) in zip(files, SIZES, strict=True):
        cv2.imwrite(str(file), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    kind, spec = opened(task, resize)
    live = kind.live(spec, {"class_names": NAMES})
    source = kind.images(spec, files, {"class_names": NAMES}).sources()["val"]
    for index, file in enumerate(files):
        batch = source.collate([source.sample(0, index)])
        for name, array in live.sample(decode(file)).items():
            expected = batch[name][0]
            assert np.array_equal(expected[..., : array.shape[-1]], array), (file.name, name)
            assert expected.dtype == array.dtype


@pytest.mark.parametrize(("task", "resize"), WAYS)
def test_lines_and_single_pixels_fit(task, resize):
    """A line of 30,000 pixels must neither fail nor be blown up to gigabytes."""
    kind, spec = opened(task, resize, side=224)
    live = kind.live(spec, {"class_names": NAMES})
    for width, height in ((30000, 1), (1, 30000), (1, 1), (1, 3)):
        sample = live.sample(np.full((height, width, 3), 9, np.uint8))
        assert sample["pixels" if task == "segmentation" else "images"].shape == (224, 224, 3)


def test_the_centre_of_a_long_image_is_that_of_the_whole_one(monkeypatch):
    image = np.random.default_rng(0).integers(0, 256, (3, 3000, 3), dtype=np.uint8)
    whole = crop.centre_cropped(image, side=96, share=0.875)
    monkeypatch.setattr(crop, "MAX_RESIZED_PIXELS", 0)
    centre = crop.centre_cropped(image, side=96, share=0.875)
    assert np.abs(whole.astype(int) - centre).max() <= 1


def test_boxes_are_mapped_back_to_the_image():
    kind, spec = opened("detection")
    live = kind.live(spec, {"class_names": NAMES, "category_ids": [7, 8, 9]})
    sample = live.sample(np.zeros((100, 200, 3), np.uint8))  # 64 x 32 pixels from row 16
    prediction = np.array([[0, 16, 32, 48, 0.9, 2], [32, 16, 99, 99, 0.4, 0], [0, 0, 9, 9, 0.1, 1]], np.float32)
    found = live.found(prediction, sample, size_wh=(200, 100), confidence=0.25)
    assert [(row["class"], row["label"], row["category_id"]) for row in found.rows] == [("c", 2, 9), ("a", 0, 7)]
    assert found.rows[0]["bbox"] == pytest.approx([0, 0, 100, 100])
    assert found.rows[1]["bbox"] == pytest.approx([100, 0, 100, 100])
    drawn = live.drawn(np.zeros((100, 200, 3), np.uint8), found, confidence=0.25)
    assert drawn.shape == (100, 200, 3)
    assert drawn.any()


def test_classes_are_ranked_and_masks_are_measured():
    kind, spec = opened("classification")
    live = kind.live(spec, {"class_names": NAMES})
    found = live.found(np.array([0.3, 0.1, 0.6], np.float32), {}, size_wh=(1, 1), confidence=0.25)
    assert [(row["class"], row["label"]) for row in found.rows] == [("c", 2), ("a", 0)]
    kind, spec = opened("segmentation", "stretch")
    live = kind.live(spec, {"class_names": NAMES})
    classes, certainty = np.zeros((64, 64), np.uint8), np.full((64, 64), 51, np.uint8)
    classes[:16], certainty[:16] = 2, 255
    maps = {"classes": classes, "certainty": certainty}
    found = live.found(maps, {}, size_wh=(10, 20), confidence=0.25)
    assert [dict(row) for row in found.rows] == [{"class": "c", "label": 2, "score": 1.0, "share": 0.25}]
    assert found.mask.shape == (20, 10)
    assert found.mask[:5].all()
    assert not found.mask[5:].any()
