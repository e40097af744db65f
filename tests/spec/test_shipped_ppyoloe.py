"""The shipped PP-YOLOE specs say what the published recipe says (numbers in tests/data/golden_ppyoloe)."""

import json
from pathlib import Path

import pytest

from mtrain.core.update.recipe import assign, group_rules, make_recipe
from mtrain.spec.config import load
from mtrain.spec.model import Spec

GOLDEN = Path(__file__).parents[1] / "data" / "golden_ppyoloe"
OFFICIAL = json.loads((GOLDEN / "configs_resolved.json").read_text())
CARDS = 8


def shipped(size: str) -> Spec:
    return load(f"ppyoloe_{size}", environ={}).spec


@pytest.mark.parametrize("size", "smlx")
def test_the_recipe_is_the_published_one(size: str) -> None:
    spec, official = shipped(size), OFFICIAL[size]
    reader, optimizer = official["TrainReader"], official["OptimizerBuilder"]
    assert spec.model.name == f"ppyoloe_{size}"
    assert spec.train.epochs == official["epoch"]
    assert spec.train.batch_size == spec.train.reference_batch_size == CARDS * reader["batch_size"]
    assert spec.optimizer.learning_rate == official["LearningRate"]["base_lr"]
    assert spec.optimizer.momentum == optimizer["optimizer"]["momentum"]
    assert not spec.optimizer.nesterov
    assert spec.optimizer.weight_decay == optimizer["regularizer"]["factor"]
    cosine, warmup = official["LearningRate"]["schedulers"]
    assert spec.schedule.horizon_epochs == cosine["max_epochs"]
    assert spec.schedule.warmup is not None
    assert spec.schedule.warmup.epochs == warmup["epochs"]
    assert spec.schedule.warmup.learning_rate_from == warmup["start_factor"]
    assert spec.train.ema is not None
    assert (spec.train.ema.decay, spec.train.ema.rule) == (official["ema_decay"], "threshold")
    assert spec.train.sync_batchnorm == (official["norm_type"] == "sync_bn")


@pytest.mark.parametrize("size", "smlx")
def test_the_images_are_made_as_published(size: str) -> None:
    spec, official = shipped(size), OFFICIAL[size]
    steps = [next(iter(step)) for step in official["TrainReader"]["sample_transforms"]]
    assert steps == ["Decode", "RandomDistort", "RandomExpand", "RandomCrop", "RandomFlip"]
    augment = spec.data.augment
    assert augment.expand is not None
    assert augment.expand.fill == official["TrainReader"]["sample_transforms"][2]["RandomExpand"]["fill_value"]
    batch = official["TrainReader"]["batch_transforms"][0]["BatchRandomResize"]
    assert augment.sizes == batch["target_size"]
    assert set(augment.interpolations) == {"nearest", "linear", "area", "cubic", "lanczos4"}
    assert [spec.data.image_size] * 2 == official["eval_size"]
    assert spec.data.resize == "stretch"
    assert not batch["keep_ratio"]


def test_all_decays_but_scale_and_shift_of_batchnorm() -> None:
    entries = json.loads((GOLDEN / "state_dicts" / "ppyoloe_crn_s_nc80.json").read_text())["entries"]
    names = [name for name, _, kind, trainable in entries if kind == "param" and trainable]
    rules = group_rules(shipped("s"))
    still, decayed = assign(names, rules)
    assert [rule["weight_decay"] for _, rule in rules] == [0.0, 0.0005]
    assert len(still) + len(decayed) == 266
    assert all(".bn." in name for name in still)
    assert not any(".bn." in name for name in decayed)
    assert any(name.endswith(".bias") for name in decayed)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 8), (2, 4), (8, 1)])
def test_fewer_ranks_take_more_micro_batches_of_the_same_global_batch(size: int, accumulate: int) -> None:
    recipe = make_recipe(shipped("s"), size=size)
    assert (recipe.micro_batch, recipe.accumulate) == (8, accumulate)
    assert recipe.clip_norm == float("inf")
    assert recipe.ema_rule == "threshold"


def test_the_short_name_is_the_small_one_and_bccd_is_complete() -> None:
    assert load("ppyoloe", environ={}).spec == shipped("s")
    bccd = load("ppyoloe_s_bccd", environ={}).spec
    assert (bccd.data.image_size, bccd.train.batch_size, bccd.data.resize) == (320, 8, "stretch")
