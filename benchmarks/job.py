"""YOLOv5n at 320 pixels on made-up pictures: what the update benchmarks train."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtrain.core.interfaces import Task
from mtrain.models.yolov5 import YOLOv5n, YOLOv5Options

SIDE, CLASSES, BOXES = 320, 3, 8


def bind() -> None:
    """Bind torch."""
    from mtrain.backends._torch import nn, ops
    from mtrain.core import binding

    binding.bind(nn, ops)


def build(global_batch: int) -> Any:
    """YOLOv5n with its start values."""
    import torch

    plugin = YOLOv5n(YOLOv5Options(anchors=None, autoanchor=False))
    names = tuple(f"class {i}" for i in range(CLASSES))
    task = Task(kind="detection", class_names=names, image_size=SIDE, global_batch=global_batch)
    task = plugin.prepare_task(task, {"boxes_wh_px": np.full((10, 2), 50.0), "class_count": CLASSES})
    model = plugin.build(task)
    state = model.state_dict()
    values = plugin.initial({name: tuple(x.shape) for name, x in state.items()}, task, seed=0)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(np.asarray(values[name])))
    return model


def micro_batches(micro: int, *, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """The same two micro batches for ever, as numpy: loading costs nothing here."""
    kept = [_micro_batch(micro, np.random.default_rng([seed, i])) for i in range(2)]
    while True:
        yield from kept


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
    }
