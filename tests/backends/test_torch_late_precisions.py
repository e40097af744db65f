"""Late updates in half precision, which Paddle has not on the CPU: a loss scale is followed as by prompt ones, bit for bit."""

import pytest

from tests.backends import test_late_updates
from tests.framework import Framework


@pytest.mark.parametrize("case", ["sgd in fp16", "lion in fp16", "adamw in bf16"])
def test_late_updates_in_half_precision_have_the_bits_of_prompt_ones(
    framework: Framework, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    fields = {"clip_norm": 0.5, "ema_decay": 0.9, "precision": case.split()[-1]}
    monkeypatch.setitem(test_late_updates.CASES, case, fields)
    whole = len(test_late_updates.ORDER)
    test_late_updates.test_late_updates_have_the_bits_of_prompt_ones(framework, case, whole)
