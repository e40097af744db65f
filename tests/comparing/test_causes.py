"""Each planted fault is found in the update it shows in, and named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mtrain.compare.profiles import PROFILES, violations
from mtrain.compare.several import explain
from mtrain.core.interfaces import Recipe
from mtrain_trace.causes import in_words
from mtrain_trace.comparing import compare
from mtrain_trace.reading import Trace, Update
from tests.comparing.jobs import GROUPS, RECIPE, Planted, run, with_options

ADAMW = replace(
    RECIPE,
    rule="adamw",
    groups=tuple(
        (match, {"weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}) for match, _ in RECIPE.groups
    ),
)
ADAM = replace(ADAMW, rule="adam")


def told(planted: Planted, reference: Planted = Planted(), asked: Recipe = RECIPE) -> tuple[str, int, list[str]]:  # noqa: B008
    """(what is said, update and quantities in which the two part)."""
    actual = compare(run(reference, asked=asked), run(planted, asked=asked))
    message = explain(actual)
    assert message, "nothing was said"
    assert violations(actual.gaps, PROFILES["bitwise"])
    return " / ".join(message), actual.first, list(actual.what)


def test_two_runs_of_one_job_have_no_cause_of_difference():
    actual = compare(run(), run())
    assert actual.first is None
    assert explain(actual) == []
    assert violations(actual.gaps, PROFILES["bitwise"]) == []


def test_clipping_that_one_backend_adds_is_named_as_the_cause():
    """The norms are about 2.4 (u + 1): the first beyond 5 is update 2's."""
    message, update, what = told(Planted(recipe=replace(RECIPE, clip_norm=5.0)))
    assert "it clips at 5.0, the spec says 10" in message
    assert (update, what[0]) == (2, "moments")


def test_clipping_that_one_backend_omits_is_named_as_the_cause():
    message, update, _ = told(Planted(recipe=replace(RECIPE, clip_norm=float("inf"))))
    assert "it does not clip" in message
    assert "the spec says 10" in message
    assert update == 4


def test_clipping_under_adamw_is_named_as_the_cause():
    message, _, _ = told(Planted(recipe=replace(ADAMW, clip_norm=5.0)), Planted(recipe=ADAMW), ADAMW)
    assert "it clips at 5.0" in message


def with_adam_options(rule: Recipe, **options: float) -> Recipe:
    return replace(rule, groups=tuple((match, {**given, **options}) for match, given in rule.groups))


@pytest.mark.parametrize("rule", [ADAM, ADAMW], ids=["adam", "adamw"])
def test_faults_under_adam_are_named_with_their_sizes(rule: Recipe):
    def told_of(planted: Planted) -> tuple[str, int, list[str]]:
        return told(planted, Planted(recipe=rule), rule)

    message, update, _ = told_of(Planted(recipe=rule, applied_factor=2.0))
    assert "the gradient that is applied is not: it is 2 times as large" in message
    assert update == 0
    message, _, what = told_of(Planted(recipe=rule, learning_rate_factor=2.0))
    assert "its step is 2 times as long" in message
    assert what[0] == "weights"
    message, _, what = told_of(Planted(recipe=with_adam_options(rule, weight_decay=0.03)))
    if rule is ADAM:
        assert "its weight decay differs from the spec's by +0.02" in message
        assert what[0] == "moments"
    else:
        assert "its decoupled weight decay differs from the spec's by +0.02" in message
        assert what[0] == "weights"
    assert "the gradient of B is 2 times that of A" in told_of(Planted(recipe=rule, gradient_factor=2.0))[0]
    message, update, _ = told_of(Planted(recipe=with_adam_options(rule, beta1=0.7)))
    # Without decay in the gradient the first update alone does not tell a momentum from a factor.
    expected = "its momentum is 0.7, 0.9 was asked for" if rule is ADAM else "as with a momentum of 0.7 instead of 0.9"
    assert expected in message
    assert update == 0


@pytest.mark.parametrize("rule", [ADAM, ADAMW], ids=["adam", "adamw"])
def test_a_momentum_that_departs_later_is_named_under_adam(rule: Recipe):
    scheduled = dict.fromkeys(range(12), 0.9)
    message, update, what = told(
        Planted(recipe=rule, momenta={**scheduled, 3: 0.6}, told_momenta=scheduled),
        Planted(recipe=rule, momenta=scheduled),
        rule,
    )
    assert "its momentum is 0.6, 0.9 was asked for" in message
    assert (update, what[0]) == (3, "moments")


def test_gradients_summed_instead_of_averaged_over_ranks_are_named_as_the_cause():
    message, update, what = told(Planted(gradient_factor=2.0))
    assert "the gradient of B is 2 times that of A, as many times as there are ranks: summed over ranks" in message
    assert (update, what[0]) == (0, "gradient")


def test_gradients_not_divided_by_the_micro_batches_are_named_as_the_cause():
    assert "the loss is not divided by the 4 micro batches" in told(Planted(gradient_factor=4.0))[0]
    assert (
        "the gradient of B is 1/8 of that of A, ranks x micro batches per update (2 x 4): summed where the mean is meant, or "
        "divided once too often" in told(Planted(gradient_factor=1 / 8))[0]
    )


def test_a_gradient_scaled_after_its_norm_was_computed_is_named_as_the_cause():
    message, _, what = told(Planted(applied_factor=2.0))
    assert "the gradient that is applied is not: it is 2 times as large, the number of ranks (2)" in message
    assert what[0] == "moments"


def test_another_momentum_is_named_as_the_cause():
    message, update, what = told(Planted(recipe=with_options(momentum=0.5)))
    assert "as with a momentum of 0.5 instead of 0.9, or another learning rate" in message
    assert (update, what[0]) == (0, "weights"), "nesterov looks ahead in the first update already"


def test_another_momentum_without_nesterov_is_named_as_the_cause():
    plain = with_options(nesterov=0.0)
    wrong = replace(plain, groups=with_options(nesterov=0.0, momentum=0.5).groups)
    message, update, what = told(Planted(recipe=wrong), Planted(recipe=plain), plain)
    assert "its momentum is 0.5, 0.9 was asked for" in message
    assert (update, what[0]) == (1, "moments")


def test_nesterov_momentum_that_one_backend_omits_or_adds_is_named_as_the_cause():
    assert "nesterov is off" in told(Planted(recipe=with_options(nesterov=0.0)))[0]
    plain = with_options(nesterov=0.0)
    message, _, _ = told(Planted(), Planted(recipe=plain), plain)
    assert "nesterov is on" in message


def test_another_weight_decay_is_named_as_the_cause():
    message, update, what = told(Planted(recipe=with_options(weight_decay=0.01)))
    assert "group 0 has a weight decay that differs by +0.01" in message
    assert (update, what[0]) == (0, "moments")


def test_another_learning_rate_is_named_as_the_cause():
    message, _, what = told(Planted(learning_rate_factor=2.0))
    assert "its step is 2 times as long, the number of ranks (2): look at the learning rate" in message
    assert what[0] == "weights"


def test_another_average_of_weights_is_named_as_the_cause():
    message, _, what = told(Planted(recipe=replace(RECIPE, ema_decay=0.5)))
    assert "it keeps 0.0906 of itself per update, 0.179 was asked for" in message
    assert what == ["averaged weights"]


def test_other_buffers_are_named_as_the_cause():
    message, _, what = told(Planted(buffer_momentum=0.2))
    assert "running statistics of BatchNorm" in message
    assert what[0] == "buffers"


def test_other_samples_start_weights_or_losses_are_named_as_the_cause():
    assert "the ranks of B received other samples, in another order" in told(Planted(other_samples_from=3))[0]
    assert told(Planted(other_samples_from=3))[1] == 3
    assert "all weights start otherwise" in told(Planted(start=0.5))[0]
    assert "the loss of B is 2 times that of A, as many times as there are ranks" in told(Planted(loss_factor=2.0))[0]
    assert "start weights, samples and labels are the same, the loss is not" in told(Planted(loss_factor=1.01))[0]
    assert "the forward pass is rounded differently" in told(Planted(loss_factor=1 + 1e-7))[0]


def with_updates(trace: Trace, change: Callable[[Update], dict[str, Any]]) -> Trace:
    return replace(trace, updates=[replace(update, **change(update)) for update in trace.updates])


def with_mask(update: Update) -> dict[str, Any]:
    moments = update.arrays["moments"]
    row = moments["momentum/group 0"]
    arrays = {**update.arrays, "moments": {**moments, "mask/group 0": row}}
    return {"arrays": arrays, "parts": {**update.parts, "moments": update.parts["moments"].plus(row)}}


def test_a_loss_or_a_moment_that_only_one_backend_has_is_named_as_the_cause():
    plain = run()
    taught = with_updates(plain, lambda update: {"loss_parts": {**update.loss_parts, "distil": update.loss}})
    masked = with_updates(plain, with_mask)
    for whole, name, what in ((taught, "distil", "loss"), (masked, "mask/group 0", "moments")):
        for a, b, words in ((whole, plain, "lacks"), (plain, whole, "has")):
            actual = compare(a, b)
            assert (actual.first, actual.what[0]) == (0, what)
            assert f"it {words} {name}" in explain(actual)[0]


def test_rounding_of_the_gradient_is_named_as_the_cause():
    message, _, what = told(Planted(noise=1e-7))
    assert "gradients are added up in another order" in message
    assert what[0] == "gradient"


def test_rounding_hides_no_cause_in_a_later_quantity():
    message, update, what = told(Planted(noise=1e-7, buffer_momentum=0.2))
    assert (update, what[0]) == (0, "gradient")
    assert "running statistics of BatchNorm" in message


def test_rounding_under_adam_is_explained():
    assert "moves weights by whole steps" in told(Planted(recipe=ADAMW, noise=1e-7), Planted(recipe=ADAMW), ADAMW)[0]
    assert "whole steps" not in told(Planted(noise=1e-7))[0]


def test_ranks_with_different_weights_are_named_as_the_cause():
    assert run(Planted(drift_at=4)).first_drift == 5
    assert "ranks do not hold the same weights after update 5" in told(Planted(drift_at=4, gradient_factor=1.1))[0]


def test_the_groups_of_this_file_are_those_of_its_recipe():
    assert [len(names) for names in GROUPS] == [2, 2]


@pytest.mark.parametrize(("planted", "profile", "agrees"), [
    (Planted(), "bitwise", True),
    (Planted(noise=1e-7), "bitwise", False),
    (Planted(noise=1e-7), "float32", True),
    (Planted(noise=1e-3), "float32", False),
    (Planted(noise=1e-2), "loose", True),
    (Planted(gradient_factor=2.0), "loose", False),
    (Planted(recipe=replace(RECIPE, clip_norm=1.0)), "loose", False),
    (Planted(recipe=with_options(momentum=0.5)), "float32", False),
    (Planted(recipe=replace(RECIPE, ema_decay=0.5)), "float32", False),
    (Planted(other_samples_from=3), "loose", False),
    (Planted(start=1e-7), "loose", False),
])  # fmt: skip
def test_profiles_allow_rounding_but_no_fault(planted, profile, agrees):
    beyond = violations(compare(run(), run(planted)).gaps, PROFILES[profile])
    assert (beyond == []) == agrees, beyond


def test_names_take_the_place_of_letters_but_not_within_other_words() -> None:
    told = in_words(
        ["A clips, B does not: lora_A.weight, net.B.bias (A and B), 1/2 of that of A: as B."], ("ddp", "fleet")
    )
    assert told == [
        "ddp clips, fleet does not: lora_A.weight, net.B.bias (ddp and fleet), 1/2 of that of ddp: as fleet."
    ]
