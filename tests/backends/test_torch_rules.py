"""The torch engine against torch's own optimizers, and what torch alone has on a CPU: half precision, compiling."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.core.interfaces import Rates
from mtrain.errors import SpecError
from tests.backends.recipes import BATCH, LOUD, recipe, update
from tests.contract.convnet import build


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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_five_updates_are_those_of_torch_optim(session: Any, rule: str, precision: str, channels_last: bool) -> None:
    model, optimizer = session.prepare(
        build, recipe(rule, clip_norm=1.0, precision=precision, channels_last=channels_last, ema_decay=0.9)
    )
    peer = copy.deepcopy(model)
    theirs = torch_optimizer(rule, peer)
    average = {k: v.clone() for k, v in peer.state_dict().items()}
    for k in range(1, 6):
        rates = Rates(learning_rates=(0.1 / k, 0.05 / k), momentum=0.8 if k < 3 else None)
        for group, learning_rate in zip(theirs.param_groups, rates.learning_rates, strict=True):
            group["lr"] = learning_rate
            group["momentum" if rule == "sgd" else "betas"] = (
                (rates.momentum or 0.9) if rule == "sgd" else (rates.momentum or 0.9, 0.99)
            )
        theirs.zero_grad()
        peer(next(session.batches([BATCH])))["total"].backward()
        norm = float(torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0))
        theirs.step()
        decay = 0.9 * (1 - math.exp(-k / 2000))
        for name, x in peer.state_dict().items():
            if x.is_floating_point():
                average[name].mul_(decay).add_(x, alpha=1 - decay)
        assert update(session, model, optimizer, rates) == pytest.approx(
            norm, rel=1e-6 if precision == "fp32" else 1e-14
        )
    state = session.state(model, optimizer)
    gap = max(float(np.abs(state.weights[n] - x.numpy()).max()) for n, x in peer.state_dict().items())
    ema_gap = max(float(np.abs(x - average[n].numpy()).max()) for n, x in state.ema.items())
    print(f"{rule} {precision} channels_last={channels_last}: weights {gap:.1e}, averages {ema_gap:.1e}")
    tolerance = 1e-14 if precision == "fp64" else (2e-6 if rule == "sgd" else 2e-5)
    assert gap <= tolerance
    assert ema_gap <= tolerance


def test_bf16_keeps_weights_in_float32_and_learns_nearly_the_same(session: Any) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model, optimizer = session.prepare(build, recipe(precision=precision, seed=1))
        for _ in range(10):
            update(session, model, optimizer, Rates(learning_rates=(0.05, 0.05)))
        assert model.head.weight.dtype == torch.float32
        losses[precision] = float(model(next(session.batches([BATCH])))["entropy"])
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


def test_fp16_scales_the_loss_halves_the_scale_after_an_overflow_and_resumes_it(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(precision="fp16", seed=1))
    reference, plain = session.prepare(build, recipe(precision="fp32", seed=1))
    rates = Rates(learning_rates=(0.05, 0.05))
    norm = update(session, model, optimizer, rates)
    assert norm == pytest.approx(update(session, reference, plain, rates), rel=0.02)
    assert session.state(model, optimizer).counters["loss_scale"] == 2.0**16
    before = session.state(model, optimizer).weights
    assert not math.isfinite(update(session, model, optimizer, rates, LOUD))
    state = session.state(model, optimizer)
    assert (state.counters["loss_scale"], state.counters["skipped"]) == (2.0**15, 1)
    assert np.array_equal(before["head.weight"], state.weights["head.weight"])
    update(session, model, optimizer, rates)
    state = session.state(model, optimizer)
    assert state.counters["loss_scale_age"] == 1, "good updates since the scale changed"
    fresh, other = session.prepare(build, recipe(precision="fp16"))
    session.restore(fresh, other, state)
    assert session.state(fresh, other).counters == state.counters


def test_compiling_keeps_names_and_what_is_called(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    model, optimizer = session.prepare(build, recipe(compile=True))
    assert compiled == [model]
    compiled.clear()
    names = [name for name, _ in model.named_children()]
    model, _ = session.prepare(build, recipe(compile=True, compile_blocks=(f"^{names[0]}$",)))
    assert compiled == [getattr(model, names[0])]
    with pytest.raises(SpecError, match=r"train\.compile: 'no such'"):
        session.prepare(build, recipe(compile=True, compile_blocks=("no such",)))
    assert set(session.state(model, optimizer).weights) == set(build().state_dict())
