"""What a plan says that a rank of a mesh holds, against sums that were done by hand."""

import pytest

from mtrain.core.interfaces.recipe import Mesh
from mtrain.spec import config
from mtrain_language.meshes.plan import Estimate, estimate

ARRAYS = [
    ("frozen", [10, 60], False, False, "one"),
    ("trained", [6, 40], False, True, "one"),
    ("frozen and cut", [4, 30], True, False, "two"),
    ("trained and cut", [8, 30], True, True, "two"),
]
"""As ``estimate`` takes them: 600 and 120 elements are frozen, 240 and 240 trained; of those that are cut, a group has parts."""


def mesh_of(*, shard: int = 1, replicate: int = 1, tensor: int = 1) -> Mesh:
    return Mesh(shard=shard, replicate=replicate, tensor=tensor)


def estimated(mesh: Mesh, *overrides: str) -> Estimate:
    spec = config.load("digits", overrides=["train.batch_size=8", *overrides], environ={}).spec
    return estimate(spec, mesh, ARRAYS)


@pytest.mark.parametrize(
    ("mesh", "trained"),
    [(mesh_of(), 480), (mesh_of(shard=2), 240), (mesh_of(tensor=2), 360), (mesh_of(shard=2, tensor=2), 180)],
)
@pytest.mark.parametrize(("rule", "moments"), [("sgd", 1), ("adamw", 2), ("lion", 1)])
@pytest.mark.parametrize("ema", [True, False])
def test_what_is_frozen_has_no_gradients_moments_and_average(mesh, trained, rule, moments, ema):
    found = estimated(mesh, f"optimizer.rule={rule}", f"train.ema={'{decay: 0.9}' if ema else 'null'}")
    assert found.gradients_bytes == 4 * trained
    assert found.moments_bytes == 4 * trained * moments
    assert found.average_bytes == (4 * trained if ema else 0)


def test_what_is_frozen_is_held_whole():
    alone, shared = estimated(mesh_of(), "train.ema=null"), estimated(mesh_of(shard=2, replicate=2), "train.ema=null")
    assert (alone.weights_bytes, shared.weights_bytes) == (4 * 1200, 4 * 600)
    assert estimated(mesh_of(tensor=2), "train.ema=null").weights_bytes == 4 * (600 + 240 + 60 + 120)


def test_in_float64_everything_is_twice_as_large():
    one, two = (
        estimated(mesh_of(shard=2), "optimizer.rule=adamw", f"train.precision={each}") for each in ("fp32", "fp64")
    )
    for name in ("weights_bytes", "gradients_bytes", "moments_bytes", "average_bytes"):
        assert getattr(two, name) == 2 * getattr(one, name) > 0, name
