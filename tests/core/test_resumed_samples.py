"""A resumed job has the samples of its checkpoint's job: another number or other ones are refused, also within epoch 0."""

from typing import Any

import pytest

from mtrain.core.interfaces import Progress
from mtrain.core.samples.resumed_samples import check_same, facts, find_reordered
from mtrain.errors import CheckpointError
from mtrain.spec.model import Spec

IN_EPOCH_0 = Progress(update=2, position=2, samples=32)
SPEC = Spec.model_validate({"train": {"updates": 4, "seed": 7}, "data": {"options": {"take": 40}}})


def body(seed: int = 7, take: int = 40, **before: Any) -> dict[str, Any]:
    data = {"options": {"take": take}, "workers": 3}
    return {"spec": {"train": {"seed": seed}, "data": data}, "extra": {"samples": before} if before else {}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (facts(count=48), facts(count=40), "the training split has 40 samples, and had 48 when"),
        (facts(count=40, digest="a"), facts(count=40, digest="b"), "the samples of the training split are not those"),
        (facts(count=40, digest="a"), facts(count=40, digest="a"), ""),
        (facts(count=40, digest="a"), facts(count=40), ""),
        (facts(count=None), facts(count=40), ""),
        ({}, facts(count=40), ""),
    ],
)
def test_other_samples_are_refused_with_what_was_changed(
    before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    checkpoint = body(take=48, **before)
    if not said:
        check_same(now, checkpoint, spec=SPEC, progress=IN_EPOCH_0)
        return
    with pytest.raises(CheckpointError) as told:
        check_same(now, checkpoint, spec=SPEC, progress=IN_EPOCH_0)
    assert said in str(told.value)
    assert "(data.options: {'take': 40} given, {'take': 48} before)" in str(told.value), (
        "and not the loader's processes"
    )
    assert "some would be trained twice in this epoch, and others not at all" in str(told.value)


def test_before_the_first_update_any_samples_will_do() -> None:
    check_same(facts(count=40), body(count=48, digest=""), spec=SPEC, progress=Progress())


def test_another_seed_is_told_as_another_order() -> None:
    assert find_reordered(body()["spec"], SPEC, IN_EPOCH_0) == []
    (within,) = find_reordered(body(seed=1)["spec"], SPEC, IN_EPOCH_0)
    assert "train.seed: 7 given, the checkpoint was trained with 1" in within
    assert "some are trained twice and others not at all" in within
    (between,) = find_reordered(body(seed=1)["spec"], SPEC, Progress(update=3, epoch=1, samples=48))
    assert "in another order" in between
    assert "twice" not in between
