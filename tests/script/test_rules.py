"""Rules and curves of scripts mean what the arguments say: sections of the spec, and learning rates of each update."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

import mtrain
from mtrain.core.update.recipe import ema_shares, make_recipe
from mtrain.core.update.schedule import Schedule
from mtrain.errors import ScriptError
from mtrain.rank.script.rules import Curve, Group, Rule
from mtrain.rank.script.settings import change_values, changes_of
from mtrain.rank.script.training import learning_rates_of
from mtrain.spec import config

UPDATES, PER_EPOCH = 200, 20
NOTHING = dict.fromkeys(
    ("optimizer", "schedule", "clip_norm", "accumulate", "precision", "sync_batchnorm", "seed", "freeze", "ema")
)


def base() -> Any:
    return config.load("_base_/script.yml", overrides=["data.format=digits", "model.name=yolov5n"], environ={}).spec


def spec_of(**arguments: Any) -> Any:
    return change_values(base(), changes_of(SimpleNamespace(**{**NOTHING, **arguments})))


def factors(curve: Curve) -> list[float]:
    """The factor of each update; the learning rate of the rule is 2."""
    spec = spec_of(optimizer=mtrain.SGD(learning_rate=2.0), schedule=curve)
    schedule = Schedule(spec, updates_per_epoch=PER_EPOCH, total_updates=UPDATES)
    return [schedule(update).learning_rates[0] / 2.0 for update in range(UPDATES + 1)]


def test_one_cycle_rises_to_its_peak_and_falls_to_its_end() -> None:
    found = factors(mtrain.OneCycle(peak=0.2, final_factor=0.01))
    # As torch's OneCycleLR: the peak of update 40 of 200 is the 40th update, which has the number 39.
    assert found[39] == max(found) == pytest.approx(1.0)
    assert found[:40] == sorted(found[:40])
    assert found[39:] == sorted(found[39:], reverse=True)
    assert found[119] == pytest.approx((1 + 0.01) / 2)  # in the middle of the fall
    assert found[199] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (mtrain.Constant(), lambda t: 1.0),
        (mtrain.Linear(final_factor=0.2), lambda t: 1 - 0.8 * t),
        (mtrain.Cosine(final_factor=0.2), lambda t: 0.6 + 0.4 * math.cos(math.pi * t)),
        (mtrain.Polynomial(power=2.0, final_factor=0.2), lambda t: 0.2 + 0.8 * (1 - t) ** 2),
        (mtrain.Exponential(final_factor=0.2), lambda t: 0.2**t),
        (mtrain.Step(milestones=[3, 7], gamma=0.5), lambda t: 0.5 ** ((t >= 0.3) + (t >= 0.7))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_curve_follows_its_formula(curve: Curve, expected: Any) -> None:
    assert factors(curve) == pytest.approx([expected(update / UPDATES) for update in range(UPDATES + 1)])


def test_a_curve_per_epoch_has_steps_and_warm_up_rises_from_zero() -> None:
    stairs = factors(mtrain.Linear(per="epoch"))
    assert stairs[: 2 * PER_EPOCH] == pytest.approx([1.0] * PER_EPOCH + [0.9] * PER_EPOCH)
    warm = factors(mtrain.Constant(warmup=8))
    assert warm[:10] == pytest.approx([update / 8 for update in range(8)] + [1.0, 1.0])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            mtrain.SGD(learning_rate=0.3, momentum=0.7, nesterov=True, weight_decay=0.1),
            {"momentum": 0.7, "nesterov": True},
        ),
        (mtrain.Adam(learning_rate=0.3, betas=(0.7, 0.8), eps=0.5, weight_decay=0.1), {"beta2": 0.8, "eps": 0.5}),
        (mtrain.AdamW(learning_rate=0.3, betas=(0.7, 0.8), eps=0.5, weight_decay=0.1), {"beta2": 0.8, "eps": 0.5}),
        (mtrain.Lion(learning_rate=0.3, betas=(0.7, 0.8), weight_decay=0.1), {"beta2": 0.8}),
        (
            mtrain.RMSprop(learning_rate=0.3, alpha=0.8, momentum=0.7, eps=0.5, weight_decay=0.1),
            {"beta2": 0.8, "eps": 0.5},
        ),
        (
            mtrain.Muon(learning_rate=0.3, betas=(0.7, 0.8), momentum=0.6, adamw=("out",)),
            {"beta1": 0.7, "beta2": 0.8, "momentum": 0.6, "nesterov": True, "adamw": ["out"], "weight_decay": 0.1},
        ),
        (mtrain.LAMB(learning_rate=0.3, betas=(0.7, 0.8), eps=0.5, weight_decay=0.1), {"beta2": 0.8, "eps": 0.5}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_rule_keeps_its_arguments(rule: Rule, expected: dict[str, Any]) -> None:
    optimizer = spec_of(optimizer=rule).optimizer
    assert optimizer.rule == type(rule).__name__.lower()
    common = {"learning_rate": 0.3, "weight_decay": 0.1, "momentum": 0.7}
    assert {key: getattr(optimizer, key) for key in (*common, *expected)} == {**common, **expected}


def test_the_values_that_are_not_given_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.nn.Parameter(torch.zeros(1))
    for rule, native in ((mtrain.Adam, torch.optim.Adam), (mtrain.AdamW, torch.optim.AdamW)):
        theirs, ours = native([weight]).defaults, spec_of(optimizer=rule(learning_rate=1.0)).optimizer
        assert (ours.momentum, ours.beta2, ours.eps) == (*theirs["betas"], theirs["eps"])
        assert ours.weight_decay == theirs["weight_decay"]
    theirs, ours = (
        torch.optim.RMSprop([weight]).defaults,
        spec_of(optimizer=mtrain.RMSprop(learning_rate=1.0)).optimizer,
    )
    assert (ours.beta2, ours.eps, ours.momentum) == (theirs["alpha"], theirs["eps"], theirs["momentum"])


def test_groups_have_their_own_decay_and_factor() -> None:
    groups = [Group(match=r"\.bias$", weight_decay=0.0, learning_rate_factor=2.0)]
    optimizer = spec_of(optimizer=mtrain.SGD(learning_rate=0.3, weight_decay=0.1, groups=groups)).optimizer
    assert [(group.match, group.learning_rate_factor, group.weight_decay) for group in optimizer.groups] == [
        (r"\.bias$", 2.0, 0.0),
        ("", 1.0, None),
    ]


def test_an_average_keeps_the_same_share_from_the_first_update_on() -> None:
    recipe = make_recipe(spec_of(ema=0.9), size=1)
    assert [ema_shares(recipe, update) for update in (1, 2, 100)] == [pytest.approx((0.9, 0.1))] * 3
    assert spec_of(ema=0).train.ema is None


@pytest.mark.parametrize(
    ("path", "value", "arguments"),
    [
        ("train.ema.decay", 0.5, {"ema": 0.9}),
        ("train.ema", {"decay": 0.5, "rule": "ramp", "ramp": 0.0}, {"ema": 0.9}),
        ("train.clip_norm", 0.5, {"clip_norm": 1.0}),
        ("optimizer.learning_rate", 0.5, {"optimizer": mtrain.SGD(learning_rate=0.1)}),
        ("schedule.warmup.updates", 7, {"schedule": mtrain.Linear(warmup=3)}),
    ],
)
def test_a_script_does_not_replace_what_the_user_has_typed(path: str, value: Any, arguments: dict[str, Any]) -> None:
    options = [f"{path}={json.dumps(value)}", "data.format=digits", "model.name=yolov5n"]
    spec = config.load("_base_/script.yml", overrides=options, environ={}).spec
    changes = changes_of(SimpleNamespace(**{**NOTHING, **arguments}))
    with pytest.raises(ScriptError, match=path.rpartition(".")[0]):
        change_values(spec, changes, outside_paths=[path])
    assert change_values(spec, changes, outside_paths=["train.seed"]) != spec


def test_a_script_may_repeat_what_the_user_has_typed() -> None:
    options = ["train.clip_norm=1.5", "data.format=digits", "model.name=yolov5n"]
    spec = config.load("_base_/script.yml", overrides=options, environ={}).spec
    assert change_values(spec, {"train.clip_norm": 1.5}, outside_paths=["train.clip_norm"]).train.clip_norm == 1.5


def test_a_function_in_place_of_a_schedule_gives_each_group_its_share() -> None:
    groups = [Group(match=r"\.bias$", learning_rate_factor=2.0), Group(match="head", learning_rate_factor=0.25)]
    spec = spec_of(optimizer=mtrain.SGD(learning_rate=1.0, groups=groups))
    schedule = learning_rates_of(
        spec, lambda update: 0.5 / (update + 1), updates_per_epoch=PER_EPOCH, total_updates=UPDATES
    )
    assert [list(schedule(update).learning_rates) for update in (0, 4)] == [
        [1.0, 0.125, 0.5],
        pytest.approx([0.2, 0.025, 0.1]),
    ]
