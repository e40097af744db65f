"""Rates over a job, and the recipe from which they follow."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.core.update.recipe import assign, check_frozen, group_rules, make_recipe, scaling
from mtrain.core.update.schedule import Schedule, factor, total_updates
from mtrain.errors import SpecError
from mtrain.spec.config import load
from mtrain.spec.model import Spec
from mtrain.spec.training import ScheduleSpec


def spec(**sections: Any) -> Spec:
    return Spec.model_validate({"train": {"epochs": 10}, **sections})


def schedule(**sections: Any) -> Schedule:
    return Schedule(spec(**sections), updates_per_epoch=100, total_updates=1000)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # at epochs 0, 5 and 10 of 10
        ("linear", (1.0, 0.505, 0.01)),
        ("cosine", (1.0, 0.505, 0.01)),
        ("polynomial", (1.0, 0.99 * 0.5**0.9 + 0.01, 0.01)),
        ("exponential", (1.0, 0.1, 0.01)),
        ("constant", (1.0, 1.0, 1.0)),
    ],
)
def test_curves_go_from_one_to_the_final_factor(name: Any, values: tuple[float, ...]) -> None:
    curve = ScheduleSpec(name=name, final_factor=0.01)
    assert [factor(curve, e, horizon_epochs=10) for e in (0, 5, 10)] == pytest.approx(values)
    assert factor(curve, 12, horizon_epochs=10) == pytest.approx(values[-1])


def test_cosine_is_flat_at_both_ends() -> None:
    curve = ScheduleSpec(name="cosine", final_factor=0.2)
    assert factor(curve, 2.5, horizon_epochs=10) == pytest.approx(1 - 0.8 * (1 - math.cos(math.pi / 4)) / 2)


def test_a_polynomial_of_power_one_is_linear() -> None:
    curve, line = ScheduleSpec(name="polynomial", power=1.0, final_factor=0.2), ScheduleSpec(final_factor=0.2)
    for epoch in (0, 1, 5, 9.5, 10):
        assert factor(curve, epoch, horizon_epochs=10) == pytest.approx(factor(line, epoch, horizon_epochs=10))


def test_exponential_falls_by_the_same_factor_in_each_epoch() -> None:
    curve = ScheduleSpec(name="exponential", final_factor=0.05)
    values = [factor(curve, epoch, horizon_epochs=10) for epoch in range(11)]
    assert [b / a for a, b in itertools.pairwise(values)] == pytest.approx([0.05**0.1] * 10)


def test_exponential_to_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="final_factor is 0, which no power reaches"):
        ScheduleSpec(name="exponential", final_factor=0.0)


def test_step_multiplies_at_each_milestone() -> None:
    curve = ScheduleSpec(name="step", milestones=[3, 6.5], gamma=0.5)
    assert [factor(curve, e, horizon_epochs=10) for e in (0, 2.9, 3, 6, 6.5, 9)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_one_cycle_peaks_where_it_is_told_to() -> None:
    curve = ScheduleSpec(name="one_cycle", peak=0.3, final_factor=0.001)
    values = [factor(curve, e / 10, horizon_epochs=10) for e in range(101)]
    assert values.index(max(values)) == 30
    assert values[0] == pytest.approx(1 / 25)
    assert (values[30], values[-1]) == pytest.approx((1.0, 0.001))


def test_the_horizon_may_be_longer_than_the_job() -> None:
    long = schedule(schedule={"name": "linear", "horizon_epochs": 20, "warmup": None})
    assert long(999).learning_rates[0] == pytest.approx(0.01 * (1 - 9 / 20 * 0.99))


def test_per_epoch_is_a_staircase_and_per_update_a_slope() -> None:
    stairs = schedule(schedule={"warmup": None})
    slope = schedule(schedule={"warmup": None, "per": "update"})
    assert stairs(100).learning_rates == stairs(199).learning_rates
    assert slope(100).learning_rates == stairs(100).learning_rates
    assert slope(101).learning_rates < slope(100).learning_rates


def test_warmup_is_that_of_yolov5() -> None:
    groups = [{"match": "bias$", "warmup_from": 0.1}, {"match": ""}]
    s = schedule(optimizer={"groups": groups}, schedule={"warmup": {"epochs": 3, "updates": 100, "momentum_from": 0.8}})
    assert s.warmup_updates == 300
    assert s(0).learning_rates == pytest.approx((0.1, 0.0))
    assert s(0).momentum == pytest.approx(0.8)
    # Towards the learning rate of the epoch that update 150 lies in, which is the second.
    target = 0.01 * (1 - 1 / 10 * 0.99)
    assert s(150).learning_rates == pytest.approx((0.1 + (target - 0.1) / 2, target / 2))
    assert s(150).momentum == pytest.approx((0.8 + 0.937) / 2)
    assert s(300).momentum is None
    assert s(300).learning_rates == pytest.approx([0.01 * (1 - 3 / 10 * 0.99)] * 2)


def test_ppyoloe_has_the_rates_of_the_original() -> None:
    golden = np.load(Path(__file__).parents[1] / "data" / "golden_ppyoloe" / "lr_3_steps_per_epoch.npz")["lr"]
    shipped = load("ppyoloe", environ={}).spec
    s = Schedule(shipped, updates_per_epoch=3, total_updates=900)
    assert s.warmup_updates == 15
    rates = [s(update) for update in range(1100)]
    assert all(len(set(r.learning_rates)) == 1 and r.momentum is None for r in rates)
    ours = np.array([r.learning_rates[0] for r in rates])
    assert np.abs(ours[:1080] - golden[:1080]).max() < 1e-15
    # Behind the horizon, which lies behind the end of the job, the original keeps its last value: 2e-8 of a learning rate.
    assert ours[1080:].max() == 0
    assert golden[1080:].max() < 2.2e-8


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_curve_behind_its_warmup_begins_there_and_ends_at_the_same_horizon(name: str) -> None:
    warmup = {"epochs": 2, "updates": None, "before_curve": True}
    s = schedule(schedule={"name": name, "per": "update", "warmup": warmup})
    assert s(100).learning_rates == pytest.approx(
        (0.005,) * 3
    )  # half way up to the full learning rate, not to that of the curve
    assert s(200).learning_rates == pytest.approx((0.01,) * 3)
    assert s(600).learning_rates == pytest.approx((0.01 * (1 + 0.01) / 2,) * 3)  # the middle of epochs 2 to 10
    assert s(1000).learning_rates == pytest.approx((0.0001,) * 3)
    stairs = schedule(schedule={"name": name, "warmup": warmup})
    assert stairs(299).learning_rates == s(200).learning_rates
    assert stairs(300).learning_rates == s(300).learning_rates


def test_a_warmup_as_long_as_the_horizon_leaves_the_end_of_the_curve() -> None:
    s = schedule(schedule={"warmup": {"epochs": 10, "updates": None, "before_curve": True}})
    assert s(999).learning_rates[0] == pytest.approx(0.01, rel=2e-3)
    assert s(1100).learning_rates[0] == pytest.approx(0.0001)


@pytest.mark.parametrize(("given", "updates"), [({"updates": 4}, 4), ({"epochs": 0.5}, 50), ({"updates": 0}, 0)])
def test_a_length_of_the_warmup_that_is_given_alone_is_its_length(given: dict[str, Any], updates: int) -> None:
    assert schedule(schedule={"warmup": given}).warmup_updates == updates
    assert schedule(schedule={"warmup": {**given, "learning_rate_from": 0.001}})(updates).momentum is None


def test_a_warmup_without_a_length_is_that_of_yolov5() -> None:
    assert schedule(schedule={"warmup": {"learning_rate_from": 0.001}}).warmup_updates == 300
    assert schedule().warmup_updates == 300
    assert schedule()(0).momentum == 0.8


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["schedule.warmup.updates=4"], (None, 4)),
        (["schedule.warmup.epochs=0.5"], (0.5, None)),
        (["schedule.warmup.epochs=2", "schedule.warmup.updates=9"], (2, 9)),
        (["schedule.warmup.updates=null"], (3, None)),
        ([], (3, 100)),
    ],
)
def test_a_length_of_the_warmup_takes_the_place_of_those_of_weaker_sources(
    overrides: list[str], lengths: tuple[float | None, int | None]
) -> None:
    warmup = load("yolov5n", overrides=overrides, environ={}).spec.schedule.warmup
    assert warmup is not None
    assert (warmup.epochs, warmup.updates) == lengths


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "lion", "rmsprop", "lamb"])
def test_the_warmup_of_momentum_leaves_the_betas_alone(rule: str) -> None:
    """YOLOv5 does so: `if "momentum" in x`, which groups of torch's SGD and RMSprop have."""
    rates = schedule(
        optimizer={"rule": rule, "momentum": 0.9}, schedule={"warmup": {"updates": 10, "momentum_from": 0.8}}
    )
    expected = pytest.approx(0.85) if rule in ("sgd", "rmsprop") else None
    assert rates(5).momentum == expected


def test_a_warmup_leaves_the_momentum_as_it_is_unless_one_is_given() -> None:
    assert schedule(schedule={"warmup": {"updates": 10}})(5).momentum is None


def test_warmup_takes_the_longer_of_its_two_lengths() -> None:
    assert schedule(schedule={"warmup": {"epochs": 0.5, "updates": 100}}).warmup_updates == 100
    assert schedule(schedule={"warmup": {"epochs": None, "updates": 7}}).warmup_updates == 7
    assert schedule(schedule={"warmup": None}).warmup_updates == 0


def test_a_rate_factor_of_a_group_multiplies_its_rate() -> None:
    s = schedule(
        optimizer={"groups": [{"match": "x", "learning_rate_factor": 0.1}, {"match": ""}]}, schedule={"warmup": None}
    )
    assert s(0).learning_rates == pytest.approx((0.001, 0.01))


@pytest.mark.parametrize(
    ("rule", "learning_rate", "decay"), [("none", 1, 1), ("linear", 0.25, 1), ("sqrt", 0.5, 1), ("yolov5", 1, 0.25)]
)
def test_scaling_rules(rule: str, learning_rate: float, decay: float) -> None:
    train = {"epochs": 10, "batch_size": 16, "reference_batch_size": 64, "learning_rate_scaling": rule}
    scaled = spec(train=train, schedule={"warmup": None})
    assert (scaling(scaled).learning_rate, scaling(scaled).weight_decay) == (learning_rate, decay)
    assert group_rules(scaled)[-1][1]["weight_decay"] == pytest.approx(0.0005 * decay)
    assert Schedule(scaled, updates_per_epoch=10, total_updates=100)(0).learning_rates[0] == pytest.approx(
        0.01 * learning_rate
    )


def test_the_length_is_in_updates_or_epochs_and_must_be_given() -> None:
    assert total_updates(spec(), 7) == 70
    assert total_updates(spec(train={"updates": 33}), 7) == 33
    with pytest.raises(SpecError, match="neither `epochs` nor `updates`"):
        total_updates(Spec(), 7)


@given(st.integers(1, 8), st.integers(1, 64), st.one_of(st.just("auto"), st.integers(1, 4)), st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_ranks_micro_batch_and_accumulate_multiply_to_the_global_batch(
    size: int, batch: int, accumulate: Any, limit: int
) -> None:
    train = {"epochs": 1, "batch_size": batch, "accumulate": accumulate, "max_micro_batch": limit}
    shares = size * (1 if accumulate == "auto" else accumulate)
    if batch % shares:
        with pytest.raises(SpecError, match=rf"train\.batch_size: {batch} does not divide among .* use") as caught:
            make_recipe(spec(train=train), size=size)
        offered = [int(x) for x in str(caught.value).split("use ")[1].split(" or ")]
        assert all(x % shares == 0 and abs(x - batch) < shares for x in offered)
        return
    recipe = make_recipe(spec(train=train), size=size)
    assert size * recipe.micro_batch * recipe.accumulate == batch
    if accumulate == "auto":
        assert recipe.micro_batch <= limit
        fewer = [a for a in range(1, recipe.accumulate) if batch % (size * a) == 0]
        assert all(batch // size // a > limit for a in fewer)


def test_a_recipe_says_all_that_touches_weights() -> None:
    recipe = make_recipe(spec(train={"epochs": 1, "clip_norm": None, "ema": None, "freeze": ["^stem"]}), size=2)
    assert recipe.clip_norm == math.inf
    assert recipe.ema_decay == 0
    assert recipe.frozen == ("^stem",)
    assert recipe.groups[0] == (r"\.bias$", {"weight_decay": 0.0, "momentum": 0.937, "nesterov": 1.0})
    adam = make_recipe(spec(optimizer={"rule": "adamw"}), size=1)
    assert adam.groups[2][1] == {"weight_decay": 0.0005, "beta1": 0.937, "beta2": 0.999, "eps": 1e-8}
    plain = make_recipe(spec(train={"epochs": 1, "clip_norm": 7.5}, optimizer={"nesterov": False}), size=1)
    assert plain.clip_norm == 7.5
    assert {options["nesterov"] for _, options in plain.groups} == {0.0}


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    names = ["a.bias", "a.weight", "b.bn.weight", "b.bn.bias"]
    assert assign(names, [("bias$", {}), (r"bn\.weight$", {}), ("never", {}), ("", {})]) == [
        ["a.bias", "b.bn.bias"],
        ["b.bn.weight"],
        [],
        ["a.weight"],
    ]


def test_a_parameter_that_no_group_takes_is_named() -> None:
    with pytest.raises(SpecError, match=r"no group takes a\.weight, b\.weight; end the list"):
        assign(["a.weight", "b.weight"], [("bias$", {})])


def test_a_pattern_that_freezes_nothing_is_refused_with_an_example() -> None:
    names = ["model.0.conv.weight", "model.0.bn.bias"]
    check_frozen(names, [r"model\.0\.", "bias$"])
    with pytest.raises(SpecError, match=r"train.freeze: 'backbone' is found in no parameter name.*model\.0\.conv"):
        check_frozen(names, ["bias$", "backbone"])
