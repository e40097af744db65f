"""A small YOLOv5n with three classes at 64 px, and batches for it, under any framework."""

from typing import Any

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Task
from mtrain.models.yolov5.model import YOLOv5n, YOLOv5Options
from tests.framework import Framework

TASK = Task(kind="detection", class_names=("a", "b", "c"), image_size=64, global_batch=2)


def shapes_of(framework: Framework, network: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the state's entries."""
    return {name: ops.shape(x) for name, x in framework.state(network).items()}


def batch_of(
    framework: Framework, *, count: int = 2, boxes: int = 4, classes: int = 3, size: int = 64, seed: int = 0
) -> dict[str, Any]:
    """Noise, and boxes anywhere."""
    rng = np.random.default_rng(seed)
    rows = np.concatenate(
        (
            rng.integers(0, count, (boxes, 1)), rng.integers(0, classes, (boxes, 1)),
            rng.uniform(0.2, 0.8, (boxes, 2)), rng.uniform(0.1, 0.4, (boxes, 2)),
        ),
        axis=1,
    )  # fmt: skip
    images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return {"images": framework.tensor(images), "targets": framework.tensor(rows.astype(np.float32))}


def ready_network(framework: Framework, task: Task = TASK, **options: Any) -> Any:
    """With start values, in training mode."""
    plugin = YOLOv5n(YOLOv5Options(**options))
    network = plugin.build(task)
    framework.load(network, plugin.initial(shapes_of(framework, network), task, seed=0))
    network.train()
    return network
