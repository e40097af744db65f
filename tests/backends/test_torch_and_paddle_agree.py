"""The same job learns the same on both frameworks; each runs in a process of its own."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.backends.processes import python
from tests.contract.learn import UPDATES
from tests.contract.training import differences

TOLERANCE = 1e-9


@pytest.mark.skipif(find_spec("paddle") is None, reason="paddle is not installed")
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "quantised"])
def test_50_updates_in_float64_are_equal(tmp_path: Path, rule: str) -> None:
    """Rounding to 8 bits could make any difference in the last bit a whole step, but only of a value that lies within it
    of the middle between two steps; no value of these updates does."""
    quantised = rule == "quantised"
    results = {}
    for framework in ("torch", "paddle"):
        out = tmp_path / f"{framework}.npz"
        process = python(f"""
            from pathlib import Path
            from tests.contract.learn import main
            main("{framework}", "{"sgd" if quantised else rule}", Path("{out}"), quantised={quantised})
        """)
        assert process.returncode == 0, process.stderr
        results[framework] = dict(np.load(out))
    gaps = differences(results["torch"], results["paddle"])
    worst = max(gaps, key=lambda name: gaps[name])
    print(f"{rule}: largest relative difference {gaps[worst]:.1e}, in {worst}")
    assert len(results["torch"]["norms"]) == UPDATES
    assert gaps[worst] <= TOLERANCE
