"""Run one rank of the DeepSpeed tests: ``deepspeed_ranks STUDIES BACKEND OUT OPTIONS`` (see ``rank_main``), started by
torchrun. The names of the remaining threads are written to OUT/threads-<rank>.json."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain.backends._torch import nn, ops
from mtrain.backends.deepspeed import DeepSpeed
from mtrain.core.interfaces import Rates, State
from tests.backends.rank_main import main
from tests.backends.studies import Whole, batches, recipe, told


def convnet(session: Any) -> Any:
    """The network of the contract tests in float32: 50 updates, accumulation, clipping, an average."""
    from mtrain.core.binding import bind
    from tests.contract import training
    from tests.contract.convnet import build
    from tests.contract.training import Case

    bind(nn, ops)
    case, c = Case(batchnorm="synced", accumulate=2), session.collective
    fields = {name: getattr(case.recipe(c.size), name) for name in case.recipe(c.size).__dataclass_fields__}
    model, optimizer = session.prepare(build, type(case.recipe(c.size))(**{**fields, "precision": "fp32"}))
    start = {
        name: x.astype(np.float32 if x.dtype == np.float64 else x.dtype) for name, x in training.start_weights().items()
    }
    session.restore(model, optimizer, State(weights=start))
    loader = session.batches(training.micro_batches(case, rank=c.rank, size=c.size, updates=50))
    norms = []
    for update in range(50):
        for i in range(2):
            with optimizer.micro_batch(last=i == 1):
                optimizer.backward(model(next(loader))["total"])
        norms.append(optimizer.step(training.rates(update % 20)))
    return told(session.state(model, optimizer), norms)


def yolov5n(session: Any, updates: int = 50, **fields: Any) -> Any:
    """YOLOv5n on squares of 64 pixels, channels last, two micro batches per update."""
    from mtrain.core.binding import bind
    from mtrain.core.interfaces import Task
    from mtrain.models.yolov5.model import YOLOv5n

    bind(nn, ops)
    torch.set_num_threads(1)
    plugin = YOLOv5n(YOLOv5n.Options())
    task = Task(kind="detection", class_names=("a", "b", "c"), image_size=64, global_batch=8 * session.collective.size)
    task = plugin.prepare_task(task, {"boxes_wh_px": np.full((8, 2), 20.0)})
    chosen = recipe(clip_norm=10.0, channels_last=True, **fields)
    model, optimizer = session.prepare(lambda: plugin.build(task, session.collective), chosen)
    weights = session.state(model, optimizer).weights
    shapes = {name: tuple(array.shape) for name, array in weights.items()}
    session.restore(model, optimizer, State(weights=plugin.initial(shapes, task, seed=0)))
    norms = []
    for update in range(updates):
        for part, batch in enumerate(session.batches(images(session, update))):
            with optimizer.micro_batch(last=part == 1):
                optimizer.backward(model(batch)["total"])
        norms.append(optimizer.step(Rates(learning_rates=(0.01, 0.01), momentum=0.9)))
    return told(session.state(model, optimizer), norms)


def images(session: Any, update: int) -> list[dict[str, np.ndarray]]:
    """Two micro batches of this rank: four images of noise with eight boxes."""
    results = []
    for part in range(2):
        rng = np.random.default_rng([update, part, session.collective.rank])
        places, sizes = rng.uniform(0.2, 0.8, (8, 2)), rng.uniform(0.1, 0.4, (8, 2))
        rows = (rng.integers(0, 4, (8, 1)), rng.integers(0, 3, (8, 1)), places, sizes)
        images = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
        results.append({"images": images, "targets": np.concatenate(rows, axis=1).astype(np.float32)})
    return results


def exchanged(session: Any) -> Any:
    """Six updates; and three, the state through another stage and back, three more."""
    chosen = recipe()
    results = {}
    own = session._sharding
    for through in (None, 0, 1, 3):
        model, optimizer = session.prepare(Whole, chosen)
        loader = session.batches(batches(session, updates=6, accumulate=2))
        for update in range(6):
            if update == 3 and through is not None:
                saved = session.state(model, optimizer)
                for stage in (through, own.stage):
                    session._sharding = replace(own, stage=stage)
                    model, optimizer = session.prepare(Whole, chosen)
                    session.restore(model, optimizer, saved)
                    saved = session.state(model, optimizer)
            for part in range(2):
                with optimizer.micro_batch(last=part == 1):
                    optimizer.backward(model(next(loader))["total"])
            optimizer.step(Rates(learning_rates=(0.1, 0.05)))
        name = "straight" if through is None else f"through stage {through}"
        results[name] = told(session.state(model, optimizer), [])
    return results


if __name__ == "__main__":
    rank, out = main(DeepSpeed, globals(), sys.argv[1:])
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    (out / f"threads-{rank}.json").write_text(json.dumps(threads))
