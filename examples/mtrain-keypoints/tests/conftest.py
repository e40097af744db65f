"""A small data set in the form of COCO's keypoints: bright dots on dark images."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NAMES = ["nose", "left_hand", "right_hand"]


def draw(folder: Path, *, count: int, seed: int) -> None:
    """Write PNG files into `folder`, and their annotations beside it as `<folder>.json`; the last person has no point."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    images, annotations = [], []
    for number in range(count):
        pixels = np.zeros((48, 64, 3), np.uint8)
        points = rng.integers(6, 42, (len(NAMES), 2))
        for (x, y), colour in zip(points, np.eye(3) * 255, strict=True):
            pixels[y - 2 : y + 3, x - 2 : x + 3] = colour
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
        images.append({"id": number, "file_name": f"{number:03}.png", "width": 64, "height": 48})
        flat = [int(value) for x, y in points for value in (x, y, 2)]
        box = [*(points.min(axis=0) - 3).tolist(), *(np.ptp(points, axis=0) + 6).tolist()]
        annotations.append({"id": number, "image_id": number, "category_id": 1, "bbox": box, "keypoints": flat})
    annotations.append({"id": count, "image_id": 0, "category_id": 1, "bbox": [0, 0, 9, 9], "keypoints": [0] * 9})
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "person", "keypoints": NAMES}, {"id": 2, "name": "cup"}],
    }
    folder.with_suffix(".json").write_text(json.dumps(content))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """The folder of a data set with both splits."""
    draw(tmp_path / "set" / "train", count=6, seed=1)
    draw(tmp_path / "set" / "val", count=3, seed=2)
    return tmp_path / "set"
