"""Updates whose metrics are read later have the bits of those that are read at once, also where one is skipped.

The late path is that of CUDA; here it is asked for on the CPU. Under both frameworks.
"""

import math
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Pruning, Quantise, Rates, State
from mtrain.core.update.recipe import MOMENTS
from tests.backends.recipes import BATCH, LOUD, recipe
from tests.contract.convnet import build
from tests.framework import Framework

RATES = Rates(learning_rates=(0.1, 0.05), momentum=None)
ORDER = [BATCH, LOUD, BATCH, BATCH, LOUD, LOUD, BATCH]
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"clip_norm": 0.5, "ema_decay": 0.9, "ema_ramp": 3.0},
    "sgd without momentum": {"clip_norm": 0.5},
    "adam": {"clip_norm": 0.5, "ema_decay": 0.9, "ema_rule": "threshold"},
    "adamw": {"ema_decay": 0.9},
    "lion": {"clip_norm": 0.5},
    "rmsprop": {"ema_decay": 0.9},
    "lamb": {"clip_norm": 0.5, "ema_decay": 0.9},
    "sgd in float64": {"clip_norm": 0.5, "ema_decay": 0.9, "precision": "fp64"},
}


def trained(framework: Framework, case: str, *, late: bool, updates: int = len(ORDER)) -> tuple[State, list[float]]:
    """The state after updates of which three are not finite, and the norms."""
    chosen = recipe(case.split()[0], **{"precision": "fp32", **CASES[case]})
    rates = Rates(learning_rates=RATES.learning_rates, momentum=0.0) if "without momentum" in case else RATES
    with framework.solo(late_figures=late) as session:
        model, optimizer = session.prepare(build, chosen)
        assert session.late == late
        reads = []
        for batch in ORDER[:updates]:
            with optimizer.micro_batch(last=True):
                optimizer.backward(model(next(session.batches([batch])))["total"])
            if late:
                reads.append(optimizer.step_later(rates, [2.0], []))
            else:
                norm = optimizer.step(rates)
                reads.append(lambda norm=norm: (norm, np.array([2.0])))
        norms = []
        for read in reads:
            norm, metrics = read()
            norms.append(norm)
            assert metrics.tolist() == [2.0]
        return session.state(model, optimizer), norms


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("updates", [1, 2, len(ORDER)])
def test_late_updates_have_the_bits_of_prompt_ones(framework: Framework, case: str, updates: int) -> None:
    prompt, norms = trained(framework, case, late=False, updates=updates)
    late, late_norms = trained(framework, case, late=True, updates=updates)
    assert [math.isfinite(norm) for norm in norms] == [batch is BATCH for batch in ORDER[:updates]]
    np.testing.assert_array_equal(norms, late_norms)
    for part in ("weights", "ema", "moments"):
        mine, other = getattr(late, part), getattr(prompt, part)
        assert list(mine) == list(other)
        for name, array in mine.items():
            assert array.tobytes() == other[name].tobytes(), (part, name)
    assert late.counters == prompt.counters


def test_every_rule_of_a_spec_is_compared() -> None:
    # Muon is torch's alone: test_torch_muon.py
    assert set(MOMENTS) <= {case.split()[0] for case in CASES} | {"muon"}


def test_an_optimizer_that_changes_a_prompt_method_alone_is_never_late(framework: Framework) -> None:
    with framework.solo(late_figures=True) as session:
        _, optimizer = session.prepare(build, recipe())
    for methods, late in ((("step",), False), (("_multiply",), False), (("step", "step_later"), True), ((), True)):
        own = {name: getattr(type(optimizer), name) for name in methods}
        optimizer.__class__ = type("Own", (type(optimizer),), own)
        assert optimizer.can_be_late == late, methods
        optimizer.__class__ = type(optimizer).__base__


def test_what_needs_the_norm_in_mid_update_reads_it_there(framework: Framework) -> None:
    with framework.solo(late_figures=True) as session:
        session.prepare(build, recipe(prune=Pruning(sparsity=True, match="conv", norm_l1=0.0)))
        assert not session.late
    with framework.solo(late_figures=True) as session:
        session.prepare(build, recipe(quantise=Quantise(start=0)))
        assert not session.late
    with framework.solo() as session:
        session.prepare(build, recipe())
        assert not session.late, "on the CPU nothing is gained"
