"""The first update in float32 is that of float64 to 3e-5, for real images at the size of the shipped specs.

float64 takes long, so its metrics are kept in ``tests/data/first_update.json``. They hold for both frameworks, and a slow test computes
them again. ``python -m tests.models.test_first_update`` writes them anew, which is due when a model's start weights or loss change.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mtrain.core.binding import bind
from mtrain.core.interfaces import Array, Precision, Rates, Recipe, State, Task
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from tests.framework import FRAMEWORKS, Framework

DATA = Path(__file__).parents[1] / "data"
METRICS = DATA / "first_update.json"
EXACT = 3e-5
CASES: Mapping[str, tuple[str, int]] = {
    "yolov5n at 320": ("yolov5n", 320),
    "yolov5n at 640": ("yolov5n", 640),
    "yolov5s at 640": ("yolov5s", 640),
    "ppyoloe_s at 640": ("ppyoloe_s", 640),
    "vit at 8": ("vit", 8),
}
MISSED = {"yolov5n at 640": 6e-5, "yolov5n at 320": 4e-5}
"""Cases that miss ``EXACT``, and what they are held to; why is not known. At 640 torch is 4.1e-5 off, in contiguous layout
3.0e-5. At 320 Paddle is 2.5e-5 off with its own BatchNorm, and 1.9e-5 to 3.1e-5 with mtrain's, whose blocks change the last
bits; torch is 2e-6 off."""
MARKS = {"yolov5n at 640": pytest.mark.slow}
CLASSES = ("Platelets", "RBC", "WBC")


def photographs(size: int) -> tuple[Array, list[list[tuple[int, list[float]]]]]:
    """The first two BCCD images as uint8 (2, S, S, 3), and the boxes of each as (class, xywh in shares of the image)."""
    folder = DATA / "bccd_small"
    actual = json.loads((folder / "annotations" / "instances_train.json").read_text())
    numbers = sorted(category["id"] for category in actual["categories"])
    chosen = sorted(actual["images"], key=lambda image: image["file_name"])[:2]
    images, boxes = [], []
    for image in chosen:
        with Image.open(folder / "images" / image["file_name"]) as opened:
            # Nearest pixels: the same in every version of the library.
            images.append(np.asarray(opened.convert("RGB").resize((size, size), Image.Resampling.NEAREST)))
        sides = [image["width"], image["height"]] * 2
        of_image = [one for one in actual["annotations"] if one["image_id"] == image["id"] and min(one["bbox"][2:]) > 1]
        # BCCD's boxes lie on whole pixels, so that centres lie on the borders of cells and a rounding moves them to another cell.
        # A part of a pixel takes them off, as augmentation does.
        moved = [(one["category_id"], np.add(one["bbox"], (0.137, 0.211, 0.0, 0.0))) for one in of_image]
        boxes.append([(numbers.index(number), list(box / sides)) for number, box in moved])
    return np.stack(images), boxes


def batch_of(framework: Framework, model: str, size: int) -> dict[str, Any]:
    """A micro batch of two images as the model takes it."""
    images, boxes = photographs(size)
    if model == "vit":
        batch = {"images": images, "labels": np.array([0, 2])}
    else:
        rows = [[i, c, x + w / 2, y + h / 2, w, h] for i, found in enumerate(boxes) for c, (x, y, w, h) in found]
        batch = {"images": images, "targets": np.array(rows, np.float32), "epoch": np.array([0])}
    return {name: framework.tensor(array) for name, array in batch.items()}


def first_update(framework: Framework, case: str, precision: Precision) -> dict[str, float]:
    """Loss, and gradient norm before clipping."""
    model, size = CASES[case]
    plugin = plugins.load("models", model)(Registry.read().options("models", model, {}, path=""))
    task = Task(kind=plugin.kind, class_names=CLASSES, image_size=size, global_batch=2)
    task = plugin.prepare_task(task, {})
    recipe = Recipe(
        rule="sgd",
        groups=(("", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": 0.0}),),
        micro_batch=2,
        precision=precision,
        channels_last=True,
    )
    with framework.solo() as session:
        network, optimizer = session.prepare(lambda: plugin.build(task, session.collective), recipe)
        shapes = {name: array.shape for name, array in session.state(network, optimizer).weights.items()}
        session.restore(network, optimizer, State(weights=plugin.initial(shapes, task, seed=0)))
        with optimizer.micro_batch(last=True):
            loss = network(batch_of(framework, model, size))["total"]
            optimizer.backward(loss)
        return {"loss": float(framework.ops.to_numpy(loss)), "norm": optimizer.step(Rates(learning_rates=(0.0,)))}


@pytest.fixture(scope="module")
def exact() -> dict[str, dict[str, float]]:
    return json.loads(METRICS.read_text())


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_loss_and_gradient_norm_of_the_first_update_are_those_of_float64(
    framework: Framework, exact: dict[str, dict[str, float]], case: str
) -> None:
    actual = first_update(framework, case, "fp32")
    off = {name: abs(actual[name] / exact[case][name] - 1) for name in ("loss", "norm")}
    print(f"{framework.name}, {case}: " + ", ".join(f"{name} {size:.1e}" for name, size in off.items()))
    assert max(off.values()) <= MISSED.get(case, EXACT), off


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_metrics_that_are_kept_are_those_of_float64(
    framework: Framework, exact: dict[str, dict[str, float]], case: str
) -> None:
    assert first_update(framework, case, "fp64") == pytest.approx(exact[case], rel=1e-9)


if __name__ == "__main__":
    torch = FRAMEWORKS["torch"]()
    bind(torch.nn, torch.ops)
    written = {case: first_update(torch, case, "fp64") for case in CASES}
    METRICS.write_text(json.dumps(written, indent=2) + "\n")
