"""``train.recompute`` on the shipped models: weights, averages, moments and statistics have the same bits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Rates, Recipe, State, Task
from mtrain.spec import plugins
from mtrain_kit import training
from tests.framework import Framework

SIZE, CLASSES = 64, ("a", "b", "c")
MODELS: dict[str, dict[str, Any]] = {
    "yolov5n": {"autobalance": True},
    "ppyoloe_s": {},
    "vit": {"patch": 16, "dropout": 0.2},
    "resnet18": {},
    "unet": {"width": 4, "depth": 2, "dropout": 0.2},
    "liteseg": {"width": 8},
}
UPDATES = 2
GROUPS = (("", {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 5e-4}),)
KEYED = {"random_key": np.array([7, -9], np.int32)}


def batch(number: int) -> dict[str, Any]:
    """Images, and the labels of every task; a model reads its own."""
    generator = np.random.default_rng(number)
    images = generator.integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8)
    masks = generator.integers(0, 3, (2, SIZE, SIZE, 1), dtype=np.uint8)
    targets = [[0, 1, 0.4, 0.5, 0.5, 0.3], [1, 2, 0.6, 0.4, 0.2, 0.5]]
    return {
        "images": images,
        "pixels": np.concatenate((images, masks), axis=3),
        "labels": np.array([0, 2]),
        "targets": np.array(targets, np.float32),
        "epoch": np.array([number]),
        **KEYED,
    }


def made(name: str) -> tuple[Any, Task]:
    kind = plugins.load("models", name)
    plugin = kind(kind.Options(**MODELS[name]))
    return plugin, plugin.prepare_task(
        Task(kind=kind.kind, class_names=list(CLASSES), image_size=SIZE, global_batch=2), {}
    )


def recipe(**fields: Any) -> Recipe:
    return Recipe(rule="sgd", groups=GROUPS, micro_batch=2, ema_decay=0.9, **fields)


def learnt(session: Any, name: str, chosen: Recipe) -> State:
    """The state after two updates."""
    plugin, task = made(name)
    model, optimizer = session.prepare(lambda: plugin.build(task, session.collective), chosen)
    shapes = {key: tuple(x.shape) for key, x in session.state(model, optimizer).weights.items()}
    session.restore(model, optimizer, State(weights=plugin.initial(shapes, task, seed=0)))
    for number in range(UPDATES):
        training_update(session, model, optimizer, plugin.arranged(batch(number)))
    state: State = session.state(model, optimizer)
    return state


def training_update(session: Any, model: Any, optimizer: Any, arranged: dict[str, Any]) -> None:
    with optimizer.micro_batch(last=True):
        optimizer.backward(model(next(session.batches([arranged])))["total"])
    optimizer.step(Rates(learning_rates=(0.05,)))


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_learn_the_same_bits(framework: Framework, name: str) -> None:
    chosen = recipe(recompute=made(name)[0].recomputable)
    assert chosen.recompute
    with framework.solo() as session:
        kept, again = (learnt(session, name, each) for each in (replace(chosen, recompute=()), chosen))
    assert training.differing_names(training.flat(kept), training.flat(again)) == []
