"""Zeros and the L1 penalty while training: what an update leaves, on both frameworks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.backends.deepspeed import DeepSpeed
from mtrain.core.interfaces import Array, Pruning, Rates, Recipe, State, Task
from mtrain.core.update.schedule import SparsityCurve
from mtrain.errors import SpecError
from mtrain.models.resnet.model import ResNet18
from mtrain.spec.training import PruneSpec
from tests.framework import Framework

RATE = 0.001


def recipe(prune: Pruning | None) -> Recipe:
    group = {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.001}
    return Recipe(
        rule="sgd",
        groups=(("", group),),
        micro_batch=2,
        precision="fp64",
        prune=prune,
        ema_decay=0.9,
        channels_last=True,
    )


class Training:
    """A small classifier that trains on one batch."""

    def __init__(self, session: Any, prune: Pruning | None) -> None:
        self.session, self.plugin = session, ResNet18()
        task = Task(kind="classification", class_names=("a", "b"), image_size=8, global_batch=2)
        self.model, self.optimizer = session.prepare(lambda: self.plugin.build(task), recipe(prune))
        shapes = {name: array.shape for name, array in self.state().weights.items()}
        session.restore(self.model, self.optimizer, State(weights=self.plugin.initial(shapes, task, seed=0)))

    def state(self) -> State:
        return self.session.state(self.model, self.optimizer)

    def update(self, number: int, sparsity: float | None = None) -> Mapping[str, Array]:
        images = np.random.default_rng(number).integers(0, 255, (2, 8, 8, 3), dtype=np.uint8)
        self.model.train()
        (batch,) = self.session.batches([{"images": images, "labels": np.array([0, 1])}])
        with self.optimizer.micro_batch(last=True):
            self.optimizer.backward(self.model(batch)["total"])
        self.optimizer.step(Rates(learning_rates=(RATE,), sparsity=sparsity))
        return self.state().weights


def reference(weights: Mapping[str, Array], share: float) -> dict[str, Array]:
    """The weights after a choice of masks, computed with numpy."""
    result = dict(weights)
    for name, array in weights.items():
        if array.ndim > 1:
            sizes = np.sort(np.abs(array), axis=None)
            result[name] = np.where(np.abs(array) > sizes[int(share * array.size) - 1], array, 0.0)
    return result


def test_the_smallest_weights_of_each_array_become_zero(framework: Framework) -> None:
    with framework.solo() as session:
        plain = Training(session, None).update(0)
        pruned = Training(session, Pruning(sparsity=0.6)).update(0, sparsity=0.3)
        for name, array in reference(plain, 0.3).items():
            np.testing.assert_array_equal(pruned[name], array, err_msg=name)


@pytest.mark.slow
def test_zeros_stay_and_grow_also_in_the_average_and_across_a_resume(framework: Framework) -> None:
    prune = Pruning(sparsity=0.6, match=r"^layer\d")
    with framework.solo() as session:
        training = Training(session, prune)
        training.update(0, sparsity=0.3)
        saved = training.state()
        masks = {name.removeprefix("mask/"): array for name, array in saved.moments.items() if name.startswith("mask/")}
        assert masks.keys() == {n for n, a in saved.weights.items() if a.ndim > 1 and n.startswith("layer")}
        after = training.update(1)
        average = training.state().ema
        for name, mask in masks.items():
            assert mask.mean() == pytest.approx(0.7, abs=0.01)
            assert not after[name][mask == 0].any()
            assert not average[name][mask == 0].any()
            assert after[name][mask == 1].all()
        training.update(2, sparsity=0.6)
        resumed = Training(session, prune)
        session.restore(resumed.model, resumed.optimizer, saved)
        resumed.update(1)
        resumed.update(2, sparsity=0.6)
        one, other = training.state(), resumed.state()
        for part in ("weights", "ema", "moments"):
            for name, array in getattr(one, part).items():
                np.testing.assert_array_equal(array, getattr(other, part)[name], err_msg=f"{part} {name}")
        for name, mask in masks.items():
            assert (one.weights[name] == 0).mean() == pytest.approx(0.6, abs=0.01)
            assert not one.weights[name][mask == 0].any()


def test_the_penalty_moves_scales_towards_zero_and_nothing_else(framework: Framework) -> None:
    with framework.solo() as session:
        plain = Training(session, None).update(0)
        pruned = Training(session, Pruning(norm_l1=20.0)).update(0)
        moved = 0
        for name, array in plain.items():
            expected = array
            if f"{name.removesuffix('.weight')}.running_var" in plain and name.endswith(".weight"):
                expected = np.sign(array) * np.maximum(np.abs(array) - RATE * 20.0, 0)
                moved += 1
            np.testing.assert_allclose(pruned[name], expected, rtol=1e-15, atol=1e-15, err_msg=name)
        assert moved == 20


@pytest.mark.parametrize("total", [1, 2, 7, 40])
def test_the_share_of_zeros_rises_to_its_end_and_stays(total: int) -> None:
    curve = SparsityCurve(PruneSpec(sparsity=0.8, start=0.25, end=0.75, every_updates=3), total_updates=total)
    shares = [share for update in range(total) if (share := curve(update)) is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 0.8


def test_a_backend_that_splits_weights_refuses_masks_before_a_rank_starts() -> None:
    with pytest.raises(SpecError, match=r"train\.prune: .*stage 2"):
        DeepSpeed(DeepSpeed.Options(stage=2)).check(recipe(Pruning(sparsity=0.5)), size=2, on_cpu=True)
    DeepSpeed(DeepSpeed.Options(stage=0)).check(recipe(Pruning(sparsity=0.5)), size=2, on_cpu=True)
