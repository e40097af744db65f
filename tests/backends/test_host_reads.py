"""An update reads nothing from its device but, one update later, its metrics. Under both frameworks; see docs/versions.md."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import HostBatch, Progress, Rates, State, Task
from mtrain.core.samples.feed import LoaderFeed
from mtrain.core.samples.sampler import Shares
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.recipe import make_recipe
from mtrain.core.update.stepping import Stepper
from mtrain.core.update.trainer import train
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from tests.backends.host_reads import counted
from tests.framework import Framework

SIDE = {"yolov5n": 64, "ppyoloe_s": 64, "vit": 8}
READ = {"numpy in mtrain/core/update/order.py:settle": 1}
METRICS = {
    # Numbers of the host go to the device from pinned memory, without waiting.
    "torch": {**READ, "tensor in mtrain/backends/_torch/optimizer.py:_upload": 1},
    "paddle": READ,
}
"""What is left of an update: one read, of metrics that were sent an update before."""


class Batches:
    """Loader of micro batches with four objects each."""

    updates_per_epoch = 100

    def __init__(self, model: str) -> None:
        self._model = model

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """Yield the same micro batch again and again."""
        side, random = SIDE[self._model], np.random.default_rng(0)
        images = random.integers(0, 255, (2, side, side, 3), dtype=np.uint8)
        epoch_1 = np.full(1, epoch)
        rows = np.array([[i, 0, 0.4 + 0.1 * j, 0.5, 0.3, 0.4] for i in range(2) for j in range(2)], np.float32)
        parts = {"labels": np.array([0, 1])} if self._model == "vit" else {"targets": rows}
        while True:
            yield {"images": images, "epoch": epoch_1, **parts}

    def close(self) -> None:
        """Do nothing."""


def spec_of(model: str) -> Any:
    """The part of a spec of which a recipe is made."""
    from mtrain.spec.model import Spec

    return Spec.model_validate(
        {
            "data": {"format": "digits"},
            "model": {"name": model},
            "train": {"batch_size": 2, "accumulate": 1, "clip_norm": 5.0, "ema": {"decay": 0.99}},
        }
    )


def reads_of_an_update(framework: Framework, model: str, *, late: bool) -> dict[str, int]:
    """Return the reads of one update in mid-job, by kind and place.

    A micro batch is handed over as memory of the host, which is left out: CUDA's path copies it from pinned memory.
    """
    plugin = plugins.load("models", model)(Registry.read().options("models", model, {}, path=""))
    task = Task(kind=plugin.kind, class_names=("a", "b"), image_size=SIDE[model], global_batch=2)
    task = plugin.prepare_task(task, {})
    by_update: list[dict[str, int]] = []
    with framework.solo(late_figures=late) as session, counted(framework.name) as reads:
        network, optimizer = session.prepare(
            lambda: plugin.build(task, session.collective), make_recipe(spec_of(model), size=1)
        )
        shapes = {name: array.shape for name, array in session.state(network, optimizer).weights.items()}
        session.restore(network, optimizer, State(weights=plugin.initial(shapes, task, seed=0)))

        def schedule(update: int) -> Rates:
            by_update.append({name: n for name, n in reads.calls.items() if "/batches.py" not in name})
            reads.calls.clear()
            return Rates(learning_rates=(1e-3,) * len(optimizer.groups))

        arranged: Any = {"arranged": plugin.arranged} if late else {}
        job = Job(
            session=session,
            steppers=[Stepper(optimizer, schedule)],
            feed=LoaderFeed(session=session, loader=Batches(model), global_batch=2, **arranged),
            total_updates=4,
            shares=Shares.even(session.collective, rounds=1),
            late=session.capabilities.late,
            sums_metrics=True,
        )
        records: list[Any] = []
        train(Loop(job, Cadences(), Hooks(on_update=records.append), Progress()), network)
    assert [record["update"] for record in records] == list(range(4))
    assert all(np.isfinite(record["gradient_norm"]) for record in records)
    assert by_update[2] == by_update[3]
    return by_update[3]


@pytest.mark.parametrize("model", SIDE)
def test_an_update_reads_its_metrics_one_update_later_and_nothing_else(framework: Framework, model: str) -> None:
    if framework.name == "paddle" and version("paddlepaddle").startswith("2."):
        pytest.skip("Paddle 2.6 makes its constants on the host; docs/versions.md counts Paddle 3.3")
    assert reads_of_an_update(framework, model, late=True) == METRICS[framework.name]


@pytest.mark.slow
@pytest.mark.parametrize("model", SIDE)
def test_without_it_norm_and_losses_are_read_in_the_update(framework: Framework, model: str) -> None:
    calls = reads_of_an_update(framework, model, late=False)
    assert sum(calls.values()) >= 2, calls
    print(framework.name, model, sum(calls.values()), calls)


def test_the_shim_sees_reads(framework: Framework) -> None:
    with counted(framework.name) as reads:
        x = framework.tensor(np.arange(3.0))
        reads.calls.clear()
        float(x[1])
        bool(x[1] > 0)
        x.numpy()
        framework.ops.nonzero(x)
    assert sum(reads.calls.values()) >= 4, reads.calls
