"""Files with a fixed batch and suppression inside: each image gets its own boxes, however many images are given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Array
from mtrain.errors import UsageError
from mtrain_deploy.exported.metadata import DETECTIONS, Input, Metadata
from mtrain_deploy.exported.model import ExportedModel

BATCH = 3


class _Session:
    """Finds as many boxes in an image as its first pixel says; ``x1`` of each is the second pixel."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=DETECTIONS)]

    def run(self, names: list[str], feed: dict[str, Array]) -> list[Array]:
        images = feed["images"][:, 0, 0].astype(np.float32)
        self.sizes.append(len(images))
        rows = [[i, value, 0, 0, 0, 0.5, 0] for i, (count, value, _) in enumerate(images) for _ in range(int(count))]
        return [np.array(rows, np.float32).reshape(-1, 7)]


def metadata() -> Metadata:
    return Metadata(
        mtrain="1",
        kind="detection",
        model="yolov5n",
        options={},
        class_names=("a",),
        image_size=1,
        inputs=(Input(name="images", key="images", dtype="uint8", shape=(BATCH, 1, 1, 3), layout="NHWC"),),
        outputs={DETECTIONS: ("boxes", 7)},
        form="nms",
        precision="fp32",
        spec={},
    )


@pytest.mark.parametrize("counts", [[1, 2, 0, 3, 1, 2, 1], [2, 1, 0], [2], [0, 1, 2, 3]])
def test_every_image_gets_its_own_boxes(counts: list[int]) -> None:
    images = np.zeros((len(counts), 1, 1, 3), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = counts, np.arange(len(counts)) + 10
    session = _Session()
    model = ExportedModel(Path("a.onnx"), session, metadata())
    found = model.predictions({"images": images})
    assert [rows[:, 0].tolist() for rows in found] == [[number + 10.0] * count for number, count in enumerate(counts)]
    assert len(model.outputs({"images": images})[DETECTIONS]) == sum(counts)  # none of the images that fill up
    assert set(session.sizes) == {BATCH}


def test_further_channels_are_left_out_and_other_shapes_refused() -> None:
    model = ExportedModel(Path("a.onnx"), _Session(), metadata())
    images = np.array([[2, 11, 0, 99], [1, 12, 0, 99]], np.uint8).reshape(2, 1, 1, 4)
    assert [rows[:, 0].tolist() for rows in model.predictions({"images": images})] == [[11, 11], [12]]
    for wrong in (np.zeros((2, 2, 1, 3)), np.zeros((2, 1, 3)), np.zeros((2, 1, 1, 1))):
        with pytest.raises(UsageError, match="images"):
            model.outputs({"images": wrong})


def test_options_are_replaced_by_those_that_the_model_knows() -> None:
    known = metadata().model_copy(update={"options": {"confidence": 0.1, "iou_threshold": 0.6}})
    model = ExportedModel(Path("a.onnx"), _Session(), known).with_options({"confidence": 0.4, "unknown": 1})
    assert model.metadata.options == {"confidence": 0.4, "iou_threshold": 0.6}
