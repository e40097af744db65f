"""Update rules, averages and clipping against torch's own."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.backends.solo import Solo
from mtrain.core.errors import CheckpointError
from mtrain.core.interfaces import Rates, Recipe, State
from tests.contract.convnet import ConvNet

BATCH = {"images": np.random.default_rng(0).normal(size=(6, 3, 8, 8)), "labels": np.arange(6) % 4}
OPTIONS = {
    "sgd": {"momentum": 0.9, "nesterov": 1.0},
    "adam": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "adamw": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def backend() -> Any:
    with Solo(Solo.Options(device="cpu")) as entered:
        yield entered


def recipe(rule: str = "sgd", **fields: Any) -> Recipe:
    options = OPTIONS[rule]
    groups = (("bias$", {**options, "weight_decay": 0.0}), ("", {**options, "weight_decay": 0.01}))
    values: dict[str, Any] = {"rule": rule, "groups": groups, "micro_batch": 6, "precision": "fp64", **fields}
    return Recipe(**values)


def torch_optimizer(rule: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.01},
    ]
    if rule == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    kind = torch.optim.Adam if rule == "adam" else torch.optim.AdamW
    return kind(groups, lr=0.1, betas=(0.9, 0.99), foreach=False)


def update(backend: Any, model: Any, optimizer: Any, rates: Rates, batch: Any = BATCH) -> float:
    with optimizer.micro_batch(last=True):
        optimizer.backward(model(next(backend.batches([batch])))["total"])
    return float(optimizer.step(rates))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_five_updates_are_those_of_torch_optim(backend: Any, rule: str, precision: str, channels_last: bool) -> None:
    model, optimizer = backend.prepare(
        ConvNet, recipe(rule, clip_norm=1.0, precision=precision, channels_last=channels_last, ema_decay=0.9)
    )
    peer = copy.deepcopy(model)
    theirs = torch_optimizer(rule, peer)
    average = {k: v.clone() for k, v in peer.state_dict().items()}
    for k in range(1, 6):
        rates = Rates(rates=(0.1 / k, 0.05 / k), momentum=0.8 if k < 3 else None)
        for group, rate in zip(theirs.param_groups, rates.rates, strict=True):
            group["lr"] = rate
            group["momentum" if rule == "sgd" else "betas"] = (
                (rates.momentum or 0.9) if rule == "sgd" else (rates.momentum or 0.9, 0.99)
            )
        theirs.zero_grad()
        peer(next(backend.batches([BATCH])))["total"].backward()
        norm = float(torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0))
        theirs.step()
        decay = 0.9 * (1 - math.exp(-k / 2000))
        for name, x in peer.state_dict().items():
            if x.is_floating_point():
                average[name].mul_(decay).add_(x, alpha=1 - decay)
        assert update(backend, model, optimizer, rates) == pytest.approx(
            norm, rel=1e-6 if precision == "fp32" else 1e-14
        )
    state = backend.state(model, optimizer)
    gap = max(float(np.abs(state.weights[n] - x.numpy()).max()) for n, x in peer.state_dict().items())
    ema_gap = max(float(np.abs(x - average[n].numpy()).max()) for n, x in state.ema.items())
    print(f"{rule} {precision} channels_last={channels_last}: weights {gap:.1e}, averages {ema_gap:.1e}")
    tolerance = 1e-14 if precision == "fp64" else (2e-6 if rule == "sgd" else 2e-5)
    assert gap <= tolerance
    assert ema_gap <= tolerance


def test_a_group_that_takes_nothing_and_a_parameter_without_gradient_are_left_alone(backend: Any) -> None:
    class Spare(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(3))

    groups = (("nowhere", {}), ("", OPTIONS["sgd"]))
    for rule in ("sgd", "adamw"):
        model, optimizer = backend.prepare(Spare, recipe(rule, groups=groups))
        update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
        assert optimizer.groups[0] == []
        assert model.unused.tolist() == [1, 1, 1]


def test_frozen_parameters_stay_and_their_batchnorm_keeps_its_statistics(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe(frozen=[r"^conv1", r"^bn1"]))
    before = backend.state(model, optimizer).weights
    update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
    model.eval()
    model.train()
    update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
    after = backend.state(model, optimizer).weights
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert not {name for name in changed if name.startswith(("conv1", "bn1"))}
    assert {"conv2.weight", "bn2.running_mean", "head.bias"} <= changed
    assert all("conv1" not in name and "bn1" not in name for group in optimizer.groups for name in group)


def test_the_ramp_of_the_average_is_that_of_the_recipe(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe(ema_decay=0.9, ema_ramp=0.0))
    before = backend.state(model, optimizer)
    update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
    after = backend.state(model, optimizer)
    for name in ("head.weight", "bn1.running_var"):
        expected = 0.9 * before.weights[name] + 0.1 * after.weights[name]
        assert after.ema[name] == pytest.approx(expected, rel=1e-12)


def test_without_an_average_evaluation_sees_the_weights_themselves(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe())
    assert backend.state(model, optimizer).ema == {}
    weight = model.head.weight.detach().clone()
    with optimizer.averaged():
        assert torch.equal(model.head.weight, weight)


def test_bf16_keeps_weights_in_float32_and_learns_nearly_the_same(backend: Any) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model, optimizer = backend.prepare(ConvNet, recipe(precision=precision, seed=1))
        for _ in range(10):
            update(backend, model, optimizer, Rates(rates=(0.05, 0.05)))
        assert model.head.weight.dtype == torch.float32
        losses[precision] = float(model(next(backend.batches([BATCH])))["entropy"])
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


def test_fp16_scales_the_loss_halves_the_scale_after_an_overflow_and_resumes_it(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe(precision="fp16", seed=1))
    reference, plain = backend.prepare(ConvNet, recipe(precision="fp32", seed=1))
    rates = Rates(rates=(0.05, 0.05))
    norm = update(backend, model, optimizer, rates)
    assert norm == pytest.approx(update(backend, reference, plain, rates), rel=0.02)
    assert backend.state(model, optimizer).counters["loss_scale"] == 2.0**16
    before = backend.state(model, optimizer).weights
    loud = {**BATCH, "images": BATCH["images"] * math.inf}
    assert not math.isfinite(update(backend, model, optimizer, rates, loud))
    state = backend.state(model, optimizer)
    assert (state.counters["loss_scale"], state.counters["skipped"]) == (2.0**15, 1)
    assert np.array_equal(before["head.weight"], state.weights["head.weight"])
    fresh, other = backend.prepare(ConvNet, recipe(precision="fp16"))
    backend.restore(fresh, other, state)
    assert backend.state(fresh, other).counters == state.counters


def test_the_loss_scale_doubles_after_2000_good_updates() -> None:
    from mtrain.backends._torch.precision import LossScaler

    scaler = LossScaler("fp16")
    for _ in range(1999):
        scaler.good()
    assert scaler.scale == 2.0**16
    scaler.good()
    assert (scaler.scale, scaler.age) == (2.0**17, 0)


def test_dropout_after_a_resume_is_that_of_the_uninterrupted_job(backend: Any) -> None:
    def build() -> ConvNet:
        return ConvNet(dropout=0.5)

    def run(*, cut: bool) -> dict[str, np.ndarray]:
        model, optimizer = backend.prepare(build, recipe())
        for k in range(4):
            if cut and k == 2:
                saved = backend.state(model, optimizer)
                torch.rand(1000)
                model, optimizer = backend.prepare(build, recipe())
                backend.restore(model, optimizer, saved)
            update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
        return dict(backend.state(model, optimizer).weights)

    whole, resumed = run(cut=False), run(cut=True)
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


def test_a_state_is_a_copy_in_c_order(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe(channels_last=True, ema_decay=0.9))
    state = backend.state(model, optimizer)
    kept = state.weights["conv1.weight"].copy()
    update(backend, model, optimizer, Rates(rates=(0.1, 0.1)))
    assert np.array_equal(state.weights["conv1.weight"], kept)
    arrays = [*state.weights.values(), *state.ema.values(), *state.moments.values()]
    assert all(array.flags.c_contiguous and array.flags.owndata for array in arrays)


def test_weights_of_another_model_are_refused_with_what_differs(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe())
    weights = backend.state(model, optimizer).weights
    weights["extra"] = np.zeros(1)
    weights["head.bias"] = np.zeros(9)
    del weights["conv1.weight"]
    with pytest.raises(CheckpointError) as caught:
        backend.restore(model, optimizer, State(weights=weights))
    for part in ("1 missing: conv1.weight", "1 unknown: extra", "head.bias (9,), expected (4,)", "use the spec"):
        assert part in str(caught.value)


def test_weights_alone_restart_the_average_from_them(backend: Any) -> None:
    model, optimizer = backend.prepare(ConvNet, recipe(ema_decay=0.9))
    weights = {name: array + 1 for name, array in backend.state(model, optimizer).weights.items()}
    backend.restore(model, optimizer, State(weights=weights))
    assert np.array_equal(backend.state(model, optimizer).ema["head.weight"], weights["head.weight"])


def test_compiling_keeps_names_and_what_is_called(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    model, optimizer = backend.prepare(ConvNet, recipe(compile=True))
    assert compiled == [model]
    assert set(backend.state(model, optimizer).weights) == set(ConvNet().state_dict())
