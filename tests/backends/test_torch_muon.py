"""Muon against its formulas, torch's own, and AdamW for what is no matrix."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._torch.engine import of_one_rank
from mtrain.backends._torch.rules import orthogonalise
from mtrain.core.interfaces import Rates, Recipe, State

SHAPES = {"tall": (7, 3), "wide": (3, 8), "emb": (5, 4), "bias": (6,), "kernel": (2, 3, 3, 3), "spare": (4, 4)}
OPTIONS = {"momentum": 0.95, "nesterov": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MATRICES = ("tall", "wide", "spare")
RATE, UPDATES = 0.02, 50


class Model(nn.Module):
    """A model whose loss has the gradients that its batch holds."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * x).sum() for name, x in gradients.items()]).sum()


def gradients(update: int) -> dict[str, Tensor]:
    """The gradients of an update; "spare" takes part in every other one."""
    generator = torch.Generator().manual_seed(update)
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: x for name, x in found.items() if name != "spare" or update % 2 == 0}


def recipe(**fields: Any) -> Recipe:
    values = {"rule": "muon", "groups": (("", OPTIONS),), "micro_batch": 1, "precision": "fp64", "own_model": True}
    return Recipe(**{**values, "adamw": ("^emb",), **fields})


def trained(*, cut: int | None = None, late: tuple[int, ...] | None = None) -> State:
    """Train; ``cut``: saved and restored before this update; ``late``: read later, and not finite in these."""
    rank = of_one_rank(torch.device("cpu"))
    rank.late_figures = late is not None
    model, optimizer = rank.prepare(Model, recipe())
    for update in range(UPDATES):
        if update == cut:
            saved = rank.state(model, optimizer)
            model, optimizer = rank.prepare(Model, recipe())
            rank.restore(model, optimizer, saved)
        loud = math.inf if late and update in late else 1.0
        with optimizer.micro_batch(last=True):
            optimizer.backward(model(gradients(update)) * loud)
        rates = Rates(learning_rates=(RATE,))
        optimizer.step(rates) if late is None else optimizer.step_later(rates, [], [])
    return rank.state(model, optimizer)


def published() -> dict[str, Tensor]:
    """Jordan et al. 2024 with the scale of Liu et al. 2025, and Loshchilov and Hutter 2019, an array at a time."""
    weights = {name: parameter.detach().clone() for name, parameter in Model().named_parameters()}
    means = {name: torch.zeros_like(x) for name, x in weights.items()}
    squares = {name: torch.zeros_like(x) for name, x in weights.items()}
    for update in range(UPDATES):
        for name, g in gradients(update).items():
            w = weights[name] * (1 - RATE * 0.1)
            if name in MATRICES:
                means[name] = 0.95 * means[name] + 0.05 * g
                x = 0.95 * means[name] + 0.05 * g
                x = x / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                step = 0.2 * math.sqrt(max(g.shape)) * x
            else:
                means[name] = 0.9 * means[name] + 0.1 * g
                squares[name] = 0.95 * squares[name] + 0.05 * g**2
                root = (squares[name] / (1 - 0.95 ** (update + 1))).sqrt() + 1e-8
                step = means[name] / (1 - 0.9 ** (update + 1)) / root
            weights[name] = w - RATE * step
    return weights


def test_50_updates_are_those_of_the_published_formulas() -> None:
    state, expected = trained(), published()
    gap = max(
        float((torch.from_numpy(state.weights[name]) - x).abs().max() / x.abs().max()) for name, x in expected.items()
    )
    print(f"50 updates of muon: largest difference {gap:.1e}")
    assert gap <= 1e-12
    assert {name for name in state.moments if name.startswith("square/")} == {
        f"square/{name}" for name in SHAPES if name not in MATRICES
    }, "a matrix needs one moment alone"


def test_a_resumed_job_goes_on_with_the_same_bits() -> None:
    whole, resumed = trained(), trained(cut=7)
    for part in ("weights", "moments"):
        assert all((x == getattr(resumed, part)[name]).all() for name, x in getattr(whole, part).items())


def test_late_updates_that_are_not_finite_change_nothing() -> None:
    late, prompt = trained(late=()), trained()
    assert all((x == late.weights[name]).all() for name, x in prompt.weights.items())
    rank = of_one_rank(torch.device("cpu"))
    rank.late_figures = True
    model, optimizer = rank.prepare(Model, recipe())
    before = rank.state(model, optimizer)
    with optimizer.micro_batch(last=True):
        optimizer.backward(model(gradients(0)) * math.inf)
    optimizer.step_later(Rates(learning_rates=(RATE,)), [], [])
    after = rank.state(model, optimizer)
    assert after.counters["skipped"] == 1
    for part in ("weights", "moments"):
        assert all((x == getattr(after, part)[name]).all() for name, x in getattr(before, part).items())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has it first")
def test_a_step_is_that_of_torch_within_the_rounding_of_bfloat16() -> None:
    ours, theirs = Model(), Model()
    own = [getattr(theirs, name) for name in MATRICES]
    settings = {"lr": RATE, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    torch_muon = torch.optim.Muon(own, **settings)
    rank = of_one_rank(torch.device("cpu"))
    model, optimizer = rank.prepare(lambda: ours, recipe())
    starts = {name: getattr(theirs, name).detach().clone() for name in MATRICES}
    for update in range(UPDATES):
        with optimizer.micro_batch(last=True):
            optimizer.backward(model(gradients(update)))
        optimizer.step(Rates(learning_rates=(RATE,)))
        theirs(gradients(update)).backward()
        torch_muon.step()
        torch_muon.zero_grad()
    gaps = []
    for name in MATRICES:
        a, b = (getattr(each, name).detach() for each in (ours, theirs))
        gaps.append(float((a - b).norm() / (b - starts[name]).norm()))
    print("way of 50 updates from that of torch.optim.Muon, relative:", *(f"{gap:.1e}" for gap in gaps))
    assert max(gaps) <= 2e-2


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(20, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert not orthogonalise(torch.zeros(3, 4)).any()


def test_patterns_that_match_a_matrix_leave_it_to_adamw() -> None:
    rank = of_one_rank(torch.device("cpu"))
    _, optimizer = rank.prepare(Model, recipe(adamw=("",)))
    assert {name.partition("/")[2] for name in optimizer.moments() if name.startswith("square/")} == set(SHAPES)
