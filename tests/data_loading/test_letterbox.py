"""Letterbox and evaluation samples are those of the YOLOv5 original (numbers in tests/data/golden_yolov5)."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.data.images.geometry import fitted_size, letterbox
from mtrain.tasks.detection.annotations import AnnotatedImage, assemble
from mtrain.tasks.detection.source import DetectionSource

GOLDEN = Path(__file__).parents[1] / "data" / "golden_yolov5"
CASES = json.loads((GOLDEN / "letterbox.json").read_text())["cases"]
ARRAYS = np.load(GOLDEN / "letterbox.npz")


def apart(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("_auto0")])
def test_letterbox_is_the_original_one(case: str) -> None:
    original, expected = CASES[case]["args"], CASES[case]
    shape = original["new_shape"]
    boxed = letterbox(ARRAYS[f"{case.split('_')[0]}_37x53"], (shape, shape) if isinstance(shape, int) else tuple(shape))
    assert list(boxed.shape) == expected["shape"]
    assert apart(boxed, ARRAYS[case]) <= 1


@pytest.mark.parametrize("side", [64, 96])
def test_an_evaluation_sample_is_the_original_dataset_item(tmp_path: Path, side: int) -> None:
    expected = CASES[f"dataset_item_{side}"]
    original = np.array(expected["labels_in"])
    size = np.array([53, 37])
    boxes = np.concatenate([(original[:, 1:3] - original[:, 3:] / 2) * size, original[:, 3:] * size], axis=1)
    path = tmp_path / "noise.png"
    cv2.imwrite(str(path), ARRAYS["noise_37x53"])
    none = np.zeros(len(original), dtype=bool)
    image = AnnotatedImage(
        path, "noise.png", 1, 53, 37, boxes, original[:, 0].astype(np.int64), none, boxes[:, 2:].prod(1)
    )
    source = DetectionSource(assemble([image], class_names="abc", category_ids=(1, 2, 3)), image_size=side)
    item = source.sample(0, 0)
    assert item.image is not None
    assert apart(item.image.transpose(2, 0, 1), ARRAYS[f"dataset_item_{side}_image_chw_rgb"]) <= 1
    assert item.targets == pytest.approx(np.array(expected["labels_out"])[:, 1:], abs=2e-6)
    (_, ((ratio_h, ratio_w), pad_wh)) = eval(expected["shapes"])
    assert item.scale_pad == pytest.approx((ratio_w, ratio_h, *pad_wh), abs=1e-12)


def test_scale_and_pad_lead_back_to_the_original_pixels(annotations) -> None:
    source = DetectionSource(annotations, image_size=128)
    batch = source.collate([source.sample(0, i) for i in range(len(source))])
    for image, _, *box in batch["targets"]:
        ratio, pad = np.split(batch["scale_pad"][int(image)], 2)
        centre, size = np.array(box[:2]) * 128, np.array(box[2:]) * 128
        corners = np.concatenate([(centre - size / 2 - pad) / ratio, (centre + size / 2 - pad) / ratio])
        original = annotations.samples[int(image)].boxes
        assert np.abs(original - corners).max(axis=1).min() < 1e-2


def test_the_longest_side_fits_exactly_whatever_the_rounding() -> None:
    for width in range(1, 700, 7):
        for height in (1, 33, 480, 699):
            assert max(fitted_size(width, height, 640)) == 640
