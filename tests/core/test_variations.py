"""Test-time augmentation: copies of images, predictions brought back to the original, joined outputs in the right order."""

from typing import Any

import numpy as np
import pytest

from mtrain.core.evaluate import Augmented, outputs
from mtrain.core.interfaces import Variation
from mtrain.data.images.varied import PADDING, vary_images
from mtrain.models.ppyoloe.model import PPYOLOEs
from mtrain.models.resnet.model import ResNet18
from mtrain.models.yolov5.model import YOLOv5n
from mtrain.tasks.classification.task import ClassificationTask
from mtrain.tasks.detection.task import DetectionTask


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)


def test_a_mirrored_copy_has_left_and_right_exchanged(images):
    ((same, as_is), (copy, mirrored)) = vary_images(images, [(False, 1.0), (True, 1.0)], step=32)
    assert same is images
    assert as_is == Variation(mirrored=False, scale=1.0, width=96)
    assert np.array_equal(copy[:, :, 0], images[:, :, -1])
    assert mirrored == Variation(mirrored=True, scale=1.0, width=96)


def test_a_smaller_copy_is_padded_to_what_the_model_takes(images):
    ((copy, variation),) = vary_images(images, [(False, 0.67)], step=32)
    assert copy.shape == (2, 64, 64, 3)
    assert variation.scale == 64 / 96  # as the pixels have it, not as it was asked for
    assert (copy[:, 43:] == PADDING).all()
    assert (copy[:, :43] != PADDING).any()


def box(variation: Variation) -> np.ndarray:
    """Return the box (10, 20, 30, 50) of the original as a network sees it in a copy."""
    x1, x2 = (variation.width - 30, variation.width - 10) if variation.mirrored else (10, 30)
    return np.array([x1, 20, x2, 50]) * variation.scale


VARIATIONS = [
    Variation(mirrored=m, scale=s, width=96) for m, s in ((False, 1.0), (True, 0.83), (False, 0.5), (True, 1.0))
]


def test_boxes_of_copies_come_back_to_the_original():
    pairs = []
    for variation in VARIATIONS:
        x1, y1, x2, y2 = box(variation)
        centred = np.array([[[(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 0.9, 0.8]]])
        pairs.append(({"decoded": centred}, variation))
    joined = YOLOv5n().joined(pairs)["decoded"]
    assert np.allclose(joined, [[[20, 35, 20, 30, 0.9, 0.8]] * 4])
    corners = [
        ({"boxes": box(variation)[None, None], "scores": np.full((1, 1, 2), 0.5)}, variation)
        for variation in VARIATIONS
    ]
    joined = PPYOLOEs().joined(corners)
    assert np.allclose(joined["boxes"], [[[10, 20, 30, 50]] * 4])
    assert joined["scores"].shape == (1, 4, 2)


def test_probabilities_of_copies_are_averaged():
    pairs = [({"probabilities": np.array([[p, 1 - p]])}, VARIATIONS[0]) for p in (0.2, 0.6)]
    assert np.allclose(ResNet18().joined(pairs)["probabilities"], [[0.4, 0.6]])


def test_the_tasks_vary_as_their_models_can_take(images):
    batch = {"images": images, "index": np.arange(2)}
    detected = DetectionTask.varied(batch, step=32)
    assert [(v.mirrored, round(v.scale, 2)) for _, v in detected] == [(False, 1.0), (True, 0.83), (False, 0.67)]
    assert all(len(copy["index"]) == 2 for copy, _ in detected)
    assert [(v.mirrored, v.scale) for _, v in DetectionTask.varied(batch, step=0)] == [(False, 1.0), (True, 1.0)]
    assert [(v.mirrored, v.scale) for _, v in ClassificationTask.varied(batch, step=0)] == [(False, 1.0), (True, 1.0)]


class Prefetching:
    """A session that reads all batches before it returns the first, as prefetching ones may."""

    def batches(self, loader: Any) -> Any:
        return iter(list(loader))

    def infer(self, model: Any, batch: Any) -> dict[str, np.ndarray]:
        return {"seen": batch["images"]}


def test_outputs_of_copies_belong_to_their_batch_although_batches_are_prefetched():
    hosts = [{"images": np.array([number])} for number in range(3)]

    def copies(batch):
        return [({"images": batch["images"] * 10 + k}, VARIATIONS[k]) for k in range(2)]

    augmented = Augmented(varied=copies, joined=lambda pairs: {"all": [int(output["seen"][0]) for output, _ in pairs]})
    session: Any = Prefetching()
    found = [(output["all"], host["images"][0]) for output, host in outputs(session, None, hosts, augmented=augmented)]
    assert found == [([0, 1], 0), ([10, 11], 1), ([20, 21], 2)]
