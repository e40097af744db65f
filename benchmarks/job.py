"""Train YOLOv5n or PP-YOLOE-s at 320 pixels on generated images: the job of the update benchmarks, on either
framework."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Array, Task

SIDE, CLASSES, BOXES = 320, 3, 8


def bind(framework: str = "torch") -> None:
    """Bind a framework's layers and functions."""
    from importlib import import_module

    from mtrain.core import binding

    binding.bind(*(import_module(f"mtrain.backends._{framework}.{name}") for name in ("nn", "ops")))


def plugin_of(model: str = "yolov5n") -> Any:
    """Return the model plugin; anchors stay unchanged."""
    from mtrain.spec import plugins

    options = {"anchors": None, "autoanchor": False} if model.startswith("yolov5") else {"static_assigner_epoch": 0}
    loaded = plugins.load("models", model)
    return loaded(loaded.Options(**options))


def task_of(plugin: Any, global_batch: int) -> Task:
    """Return a detection task with three classes."""
    names = tuple(f"class {i}" for i in range(CLASSES))
    task = Task(kind="detection", class_names=names, image_size=SIDE, global_batch=global_batch)
    prepared: Task = plugin.prepare_task(task, {"boxes_wh_px": np.full((10, 2), 50.0), "class_count": CLASSES})
    return prepared


def build(global_batch: int, model: str = "yolov5n", collective: Any = None) -> Any:
    """Build the network as the framework initialises it; callers set the start values."""
    plugin = plugin_of(model)
    return plugin.build(task_of(plugin, global_batch), collective or OneRank())


def start_values(shapes: dict[str, tuple[int, ...]], global_batch: int, model: str = "yolov5n") -> dict[str, Array]:
    """Return the model's start values by name."""
    plugin = plugin_of(model)
    values: dict[str, Array] = plugin.initial(shapes, task_of(plugin, global_batch), seed=0)
    return values


def micro_batches(micro: int, *, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the same two micro batches for ever, as numpy arrays, so that loading costs nothing."""
    batches = [_micro_batch(micro, np.random.default_rng([seed, i])) for i in range(2)]
    while True:
        yield from batches


def _micro_batch(micro: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    count = micro * BOXES
    image = np.repeat(np.arange(micro), BOXES)[:, None]
    columns = [
        image,
        generator.integers(0, CLASSES, (count, 1)),
        generator.uniform(0.2, 0.8, (count, 2)),
        generator.uniform(0.05, 0.3, (count, 2)),
    ]
    return {
        "images": generator.integers(0, 256, (micro, SIDE, SIDE, 3), dtype=np.uint8),
        "targets": np.concatenate(columns, axis=1).astype(np.float32),
        "index": np.arange(micro),
        "epoch": np.zeros(1, np.int64),
    }
