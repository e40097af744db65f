"""Make an annotation file in COCO's form, with as many boxes as are asked for and no images behind it."""

import json
from pathlib import Path

import numpy as np

BOXES_PER_IMAGE = 7.33
"""As in COCO's train2017: 860,001 boxes on 117,266 images that have any."""
CLASSES = 80


def write(folder: Path, *, boxes: int, seed: int = 1) -> Path:
    """Write ``annotations/instances_train.json`` and return it. Boxes lie inside images of 640 x 480."""
    generator = np.random.default_rng(seed)
    images = max(1, round(boxes / BOXES_PER_IMAGE))
    owner = np.sort(generator.integers(0, images, boxes))
    corner = generator.uniform(0, [500, 400], (boxes, 2))
    size = generator.uniform(4, [140, 80], (boxes, 2))
    label = generator.integers(1, CLASSES + 1, boxes)
    content = {
        "images": [
            {"id": number + 1, "file_name": f"{number:012d}.jpg", "width": 640, "height": 480}
            for number in range(images)
        ],
        "annotations": [
            {
                "id": number + 1,
                "image_id": int(owner[number]) + 1,
                "category_id": int(label[number]),
                "bbox": [*(round(float(value), 2) for value in (*corner[number], *size[number]))],
                "area": round(float(size[number].prod()), 3),
                "iscrowd": 0,
            }
            for number in range(boxes)
        ],
        "categories": [{"id": number, "name": f"class {number}"} for number in range(1, CLASSES + 1)],
    }
    path = folder / "annotations" / "instances_train.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "000000000000.jpg").touch()
    return path
