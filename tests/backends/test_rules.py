"""Update rules, averages, clipping and state, on every framework, against numpy."""

import math
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Rates, State
from mtrain.core.update.recipe import ema_shares
from mtrain.errors import CheckpointError, SpecError
from tests.backends.recipes import BATCH, LOUD, OPTIONS, recipe, update
from tests.contract.convnet import build
from tests.contract.training import start_weights
from tests.framework import Framework

RATES = Rates(learning_rates=(0.1, 0.1))
CLIP_NORM = 2.05


class Reference:
    """The rules as their papers and torch.optim state them, one array at a time."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.moments: dict[str, np.ndarray] = {}
        self.updates = 0

    def step(self, weights: dict[str, np.ndarray], grads: dict[str, np.ndarray], rates: Rates) -> None:
        self.updates += 1
        for name, grad in grads.items():
            bias = name.endswith("bias")
            learning_rate, decay = rates.learning_rates[0 if bias else 1], 0.0 if bias else 0.01
            kind = self._sgd if self.rule == "sgd" else self._adam
            weights[name] = kind(
                name, weights[name], grad, learning_rate, decay, 0.9 if rates.momentum is None else rates.momentum
            )

    def _sgd(
        self, name: str, x: np.ndarray, grad: np.ndarray, learning_rate: float, decay: float, momentum: float
    ) -> Any:
        grad = grad + decay * x
        velocity = momentum * self.moments.get(f"momentum/{name}", 0.0) + grad
        self.moments[f"momentum/{name}"] = velocity
        return x - learning_rate * (grad + momentum * velocity)

    def _adam(
        self, name: str, x: np.ndarray, grad: np.ndarray, learning_rate: float, decay: float, beta1: float
    ) -> Any:
        if self.rule == "adamw":
            x = x - learning_rate * decay * x
        else:
            grad = grad + decay * x
        mean = beta1 * self.moments.get(f"mean/{name}", 0.0) + (1 - beta1) * grad
        square = 0.99 * self.moments.get(f"square/{name}", 0.0) + (1 - 0.99) * grad**2
        self.moments |= {f"mean/{name}": mean, f"square/{name}": square}
        root = np.sqrt(square) / math.sqrt(1 - 0.99**self.updates) + 1e-8
        return x - learning_rate / (1 - beta1**self.updates) * mean / root


def gradients(session: Any, framework: Framework, model: Any) -> dict[str, np.ndarray]:
    """Return the gradients of the loss of ``BATCH``; running statistics change."""
    parameters = framework.parameters(model)
    loss = model(next(session.batches([BATCH])))["total"]
    return dict(zip(parameters, framework.gradients(loss, list(parameters.values())), strict=True))


def largest_gap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert set(a) == set(b)
    return max(float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), 1e-3)) for name in a)


@pytest.mark.parametrize("ema_rule", ["ramp", "threshold"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_updates_and_averages_are_those_of_the_formulas(
    session: Any, framework: Framework, rule: str, precision: str, ema_rule: str
) -> None:
    chosen = recipe(rule, clip_norm=CLIP_NORM, precision=precision, ema_decay=0.9, ema_rule=ema_rule)
    model, optimizer = session.prepare(build, chosen)
    session.restore(model, optimizer, State(weights=start_weights()))
    norms = []
    start = session.state(model, optimizer)
    weights, average, reference = start.weights, start.ema, Reference(rule)
    for k in range(1, 7):
        rates = Rates(learning_rates=(0.05 / k, 0.02 / k), momentum=(0.0, 0.8)[k - 1] if k < 3 else None)
        grads = gradients(session, framework, model)
        norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads.values()))
        scale = min(1.0, CLIP_NORM / (norm + 1e-6))
        reference.step(weights, {name: g * scale for name, g in grads.items()}, rates)
        actual = update(session, model, optimizer, rates)
        norms.append(actual)
        assert actual == pytest.approx(norm, rel=1e-6 if precision == "fp32" else 1e-12)
        state = session.state(model, optimizer)
        weights |= {name: x for name, x in state.weights.items() if name not in grads}
        keep, take = ema_shares(chosen, k)
        average = {name: keep * x + take * weights[name] for name, x in average.items()}
    assert max(norms) > CLIP_NORM > min(norms)
    gaps = [
        largest_gap(weights, state.weights),
        largest_gap(average, state.ema),
        largest_gap(reference.moments, state.moments),
    ]
    print(f"{framework.name} {rule} {precision}: weights {gaps[0]:.1e}, averages {gaps[1]:.1e}, moments {gaps[2]:.1e}")
    assert max(gaps) <= (1e-12 if precision == "fp64" else 2e-4)


def test_a_rule_without_its_options_takes_plain_steps(session: Any, framework: Framework) -> None:
    model, optimizer = session.prepare(build, recipe(groups=(("", {}),)))
    before = session.state(model, optimizer).weights
    grads = gradients(session, framework, model)
    update(session, model, optimizer, Rates(learning_rates=(0.1,)))
    after = session.state(model, optimizer).weights
    expected = {name: before[name] - 0.1 * grad for name, grad in grads.items()}
    assert largest_gap(expected, {name: after[name] for name in grads}) <= 1e-14


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_group_that_takes_nothing_and_a_parameter_without_gradient_are_left_alone(
    session: Any, framework: Framework, rule: str
) -> None:
    def spare() -> Any:
        model = build()
        # Between others of its group, so that they are not neighbours.
        model.conv2.unused = framework.nn.parameter((3,), fill=1.0)
        return model

    options = {**OPTIONS[rule], "weight_decay": 0.1}
    model, optimizer = session.prepare(spare, recipe(rule, groups=(("nowhere", {}), ("", options))))
    peer, reference = session.prepare(build, recipe(rule, groups=(("nowhere", {}), ("", options))))
    names = optimizer.groups[1]
    assert optimizer.groups[0] == []
    assert 0 < names.index("conv2.unused") < len(names) - 1
    weights = session.state(peer, reference).weights
    session.restore(model, optimizer, State(weights={**weights, "conv2.unused": np.ones(3)}))
    for _ in range(2):
        update(session, model, optimizer, RATES)
        update(session, peer, reference, RATES)
    state, other = session.state(model, optimizer), session.state(peer, reference)
    assert state.weights.pop("conv2.unused").tolist() == [1, 1, 1]
    assert all(not state.moments[name].any() for name in state.moments if name.endswith("unused"))
    assert all(np.array_equal(state.weights[name], x) for name, x in other.weights.items())


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_parameter_that_an_update_left_out_is_left_alone_in_it(session: Any, framework: Framework, rule: str) -> None:
    model, optimizer = session.prepare(build, recipe(rule))
    used = next(session.batches([BATCH]))

    def step(*, everything: bool) -> State:
        with optimizer.micro_batch(last=True):
            loss = model(used)["total"] if everything else framework.ops.sum(model.head.bias * model.head.bias)
            optimizer.backward(loss)
        optimizer.step(RATES)
        return session.state(model, optimizer)

    before = step(everything=True)
    after = step(everything=False)
    assert not np.array_equal(before.weights["head.bias"], after.weights["head.bias"])
    others = [name for group in optimizer.groups for name in group if name != "head.bias"]
    assert all(np.array_equal(before.weights[name], after.weights[name]) for name in others)
    assert all(np.array_equal(x, after.moments[name]) for name, x in before.moments.items() if "head.bias" not in name)


def test_accumulated_micro_batches_are_one_batch(session: Any, framework: Framework) -> None:
    frozen = ["bn.*weight"]  # statistics of a micro batch are not those of the batch
    states, start = [], start_weights()
    for accumulate in (1, 3):
        model, optimizer = session.prepare(build, recipe(frozen=frozen, accumulate=accumulate))
        session.restore(model, optimizer, State(weights=start))
        for i, part in enumerate(np.split(np.arange(6), accumulate)):
            batch = {name: x[part] for name, x in BATCH.items()}
            with optimizer.micro_batch(last=i == accumulate - 1):
                optimizer.backward(model(next(session.batches([batch])))["total"])
        optimizer.step(RATES)
        states.append(session.state(model, optimizer).weights)
    assert largest_gap(*states) <= 1e-13


def test_frozen_parameters_stay_and_their_batchnorm_keeps_its_statistics(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(frozen=[r"^conv1", r"^bn1"]))
    before = session.state(model, optimizer).weights
    update(session, model, optimizer, RATES)
    model.eval()
    model.train()
    update(session, model, optimizer, RATES)
    after = session.state(model, optimizer).weights
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert not {name for name in changed if name.startswith(("conv1", "bn1"))}
    assert {"conv2.weight", "bn2.running_mean", "head.bias"} <= changed
    assert all("conv1" not in name and "bn1" not in name for group in optimizer.groups for name in group)


def test_freezing_everything_is_refused(session: Any) -> None:
    with pytest.raises(SpecError, match="leaves no parameter to train"):
        session.prepare(build, recipe(frozen=[""]))


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(ema_decay=0.9))
    update(session, model, optimizer, RATES)
    before = session.state(model, optimizer)
    assert not math.isfinite(update(session, model, optimizer, RATES, LOUD))
    after = session.state(model, optimizer)
    parameters = {name for group in optimizer.groups for name in group}
    for part in ("weights", "ema", "moments"):
        old, new = getattr(before, part), getattr(after, part)
        names = [name for name in old if part != "weights" or name in parameters]
        assert all(np.array_equal(old[name], new[name]) for name in names)
    assert {k: after.counters[k] for k in ("updates", "skipped", "skipped_in_a_row")} == {
        "updates": 1,
        "skipped": 1,
        "skipped_in_a_row": 1,
    }


def test_averages_take_the_models_place_and_give_it_back(session: Any, framework: Framework) -> None:
    model, optimizer = session.prepare(build, recipe(ema_decay=0.9, ema_ramp=0.0))
    update(session, model, optimizer, RATES)
    state = session.state(model, optimizer)

    def held() -> dict[str, np.ndarray]:
        return {name: np.array(framework.ops.to_numpy(x)) for name, x in framework.state(model).items()}

    with optimizer.averaged():
        inside = held()
    assert all(np.array_equal(inside[name], x) for name, x in state.ema.items())
    assert all(np.array_equal(x, state.weights[name]) for name, x in held().items())
    assert not np.array_equal(inside["head.weight"], state.weights["head.weight"])
    update(session, model, optimizer, RATES)
    assert not np.array_equal(session.state(model, optimizer).weights["head.weight"], state.weights["head.weight"])


def test_without_an_average_evaluation_sees_the_weights_themselves(session: Any, framework: Framework) -> None:
    model, optimizer = session.prepare(build, recipe())
    state = session.state(model, optimizer)
    assert state.ema == {}
    with optimizer.averaged():
        assert np.array_equal(framework.ops.to_numpy(model.head.weight), state.weights["head.weight"])


def test_dropout_after_a_resume_is_that_of_the_uninterrupted_job(session: Any, framework: Framework) -> None:
    def dropping() -> Any:
        native = __import__(framework.name).nn.Dropout
        return build(native(0.5))

    def run(*, cut: bool) -> dict[str, np.ndarray]:
        model, optimizer = session.prepare(dropping, recipe())
        for k in range(4):
            if cut and k == 2:
                saved = session.state(model, optimizer)
                model.drop(framework.tensor(np.ones(1000, np.float32)))  # draws
                model, optimizer = session.prepare(dropping, recipe())
                session.restore(model, optimizer, saved)
            update(session, model, optimizer, RATES)
        return dict(session.state(model, optimizer).weights)

    whole, resumed = run(cut=False), run(cut=True)
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


def test_dropout_after_a_skipped_update_differs_from_that_of_the_skipped_one(
    session: Any, framework: Framework
) -> None:
    def drawn(*, skipped: bool) -> np.ndarray:
        native = __import__(framework.name).nn.Dropout
        model, optimizer = session.prepare(lambda: build(native(0.5)), recipe())
        if skipped:
            assert not math.isfinite(update(session, model, optimizer, RATES, LOUD))
        return np.array(framework.ops.to_numpy(model.drop(framework.tensor(np.ones(200, np.float32)))))

    assert not np.array_equal(drawn(skipped=False), drawn(skipped=True))


def test_each_rank_draws_its_own_dropout(session: Any, framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(rank: int) -> np.ndarray:
        monkeypatch.setattr(type(session.collective), "rank", rank)
        native = __import__(framework.name).nn.Dropout
        model, _ = session.prepare(lambda: build(native(0.5)), recipe())
        return np.array(framework.ops.to_numpy(model.drop(framework.tensor(np.ones(200, np.float32)))))

    assert np.array_equal(drawn(0), drawn(0))
    assert not np.array_equal(drawn(0), drawn(1))


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_job_goes_on_from_its_state_bit_for_bit(session: Any, rule: str) -> None:
    def run(*, cut: bool) -> State:
        model, optimizer = session.prepare(build, recipe(rule, ema_decay=0.9))
        for k in range(4):
            if cut and k == 2:
                saved = session.state(model, optimizer)
                model, optimizer = session.prepare(build, recipe(rule, ema_decay=0.9, seed=9))
                session.restore(model, optimizer, saved)
            update(session, model, optimizer, RATES)
        return session.state(model, optimizer)

    whole, resumed = run(cut=False), run(cut=True)
    for part in ("weights", "ema", "moments"):
        a, b = getattr(whole, part), getattr(resumed, part)
        assert list(a) == list(b)
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert whole.counters == resumed.counters


def test_a_state_is_a_copy_in_c_order(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(channels_last=True, ema_decay=0.9))
    state = session.state(model, optimizer)
    saved = state.weights["conv1.weight"].copy()
    update(session, model, optimizer, RATES)
    assert np.array_equal(state.weights["conv1.weight"], saved)
    arrays = [*state.weights.values(), *state.ema.values(), *state.moments.values()]
    assert all(array.flags.c_contiguous and array.flags.owndata for array in arrays)


def test_a_state_has_neutral_names_and_shapes(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(ema_decay=0.9))
    state = session.state(model, optimizer)
    norm = {"weight": (6,), "bias": (6,), "running_mean": (6,), "running_var": (6,), "num_batches_tracked": ()}
    expected = {
        "conv1.weight": (6, 3, 3, 3),
        **{f"bn1.{name}": shape for name, shape in norm.items()},
        "conv2.weight": (8, 6, 3, 3),
        **{f"bn2.{name}": shape and (8,) for name, shape in norm.items()},
        "head.weight": (4, 8),
        "head.bias": (4,),
    }
    assert {name: x.shape for name, x in state.weights.items()} == expected
    assert state.weights["bn1.num_batches_tracked"].dtype == np.int64
    assert set(state.ema) == {name for name in expected if not name.endswith("tracked")}
    assert set(state.moments) == {
        f"momentum/{name}" for name in expected if name.endswith(("weight", "bias")) and "running" not in name
    }


def test_weights_of_another_model_are_refused_with_what_differs(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe())
    weights = session.state(model, optimizer).weights
    weights["extra"] = np.zeros(1)
    weights["head.bias"] = np.zeros(9)
    del weights["conv1.weight"]
    with pytest.raises(CheckpointError) as caught:
        session.restore(model, optimizer, State(weights=weights))
    for part in ("1 missing: conv1.weight", "1 unknown: extra", "head.bias (9,), expected (4,)", "use the spec"):
        assert part in str(caught.value)


def test_weights_alone_restart_the_average_from_them(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(ema_decay=0.9))
    weights = {name: array + 1 for name, array in session.state(model, optimizer).weights.items()}
    session.restore(model, optimizer, State(weights=weights))
    assert np.array_equal(session.state(model, optimizer).ema["head.weight"], weights["head.weight"])


def test_the_loss_scale_doubles_after_2000_good_updates() -> None:
    from mtrain.core.update.loss_scale import LossScaler

    scaler = LossScaler("fp16")
    for _ in range(1999):
        scaler.good()
    assert scaler.scale == 2.0**16
    scaler.good()
    assert (scaler.scale, scaler.age) == (2.0**17, 0)
    for _ in range(1999):
        scaler.good()
    scaler.bad()
    scaler.good()
    assert (scaler.scale, scaler.age) == (2.0**16, 1), "2,000 in a row"
