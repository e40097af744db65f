"""Images of bright red rectangles on a dull smooth ground: where a box must be can be seen in the pixels."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble

SIZES = [(160, 120), (120, 160), (128, 128), (200, 90), (64, 48), (333, 250), (160, 160), (90, 100)]
"""(width, height)"""
INK = (250, 20, 20)


def paint(rng: np.random.Generator, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """RGB image, and (2, 4) xywh of its two rectangles, far from each other and from the borders."""
    ground = rng.integers(70, 160, (4, 5, 3)).astype(np.uint8)
    image = cv2.resize(ground, (width, height), interpolation=cv2.INTER_CUBIC)
    boxes = []
    for half in (0, 1):
        w, h = int(width * rng.uniform(0.2, 0.3)), int(height * rng.uniform(0.3, 0.5))
        x = int(half * width / 2 + rng.uniform(0.25, 0.7) * (width / 2 - w))
        y = int(rng.uniform(0.15, 0.85) * (height - h))
        image[y : y + h, x : x + w] = INK
        boxes.append([x, y, w, h])
    return image, np.array(boxes, dtype=np.float64)


@pytest.fixture(scope="session")
def annotations(tmp_path_factory: pytest.TempPathFactory) -> Annotations:
    """Twelve images, PNG (exact) and one JPEG."""
    folder = tmp_path_factory.mktemp("rectangles")
    rng = np.random.default_rng(5)
    images = []
    for i in range(12):
        width, height = SIZES[i % len(SIZES)]
        image, boxes = paint(rng, width, height)
        path = folder / f"{i:02}{'.jpg' if i == 3 else '.png'}"
        cv2.imwrite(str(path), image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
        none = np.zeros(2, dtype=bool)
        images.append(
            AnnotatedImage(path, path.name, i, width, height, boxes, np.array([0, 1]), none, boxes[:, 2:].prod(1))
        )
    return assemble(images, class_names=("left", "right"), category_ids=(1, 2))


@pytest.fixture
def one_image(tmp_path: Path) -> tuple[Path, Annotations]:
    """A single 160 x 120 PNG without boxes."""
    path = tmp_path / "one.png"
    cv2.imwrite(str(path), paint(np.random.default_rng(1), 160, 120)[0])
    empty = np.zeros((0, 4))
    image = AnnotatedImage(path, path.name, 1, 160, 120, empty, np.zeros(0, int), np.zeros(0, bool), np.zeros(0))
    return path, assemble([image], class_names=("a",), category_ids=(1,))
