"""The same job learns the same on both frameworks; each runs in a process of its own."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.backends.processes import python
from tests.contract.learn import UPDATES
from tests.contract.training import differences
from tests.starts import starts_processes

TOLERANCE = 1e-9
RULES = ("sgd", "adam", "adamw", "quantised")


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what each framework learns by each rule; one process of each framework trains them all."""
    folder = tmp_path_factory.mktemp("learned")
    for framework in ("torch", "paddle"):
        process = python(f"""
            from pathlib import Path
            from tests.contract.learn import main
            for rule in {RULES}:
                quantised = rule == "quantised"
                out = Path("{folder}", "{framework}-" + rule + ".npz")
                main("{framework}", "sgd" if quantised else rule, out, quantised=quantised)
        """)
        assert process.returncode == 0, process.stderr
    return folder


@pytest.mark.smoke
@pytest.mark.skipif(find_spec("paddle") is None, reason="paddle is not installed")
@pytest.mark.parametrize("rule", RULES)
def test_50_updates_in_float64_are_equal(folder: Path, rule: str) -> None:
    """Rounding to 8 bits could make any difference in the last bit a whole step, but only of a value that lies within it
    of the middle between two steps; no value of these updates does."""
    results = {framework: dict(np.load(folder / f"{framework}-{rule}.npz")) for framework in ("torch", "paddle")}
    gaps = differences(results["torch"], results["paddle"])
    worst = max(gaps, key=lambda name: gaps[name])
    print(f"{rule}: largest relative difference {gaps[worst]:.1e}, in {worst}")
    assert len(results["torch"]["norms"]) == UPDATES
    assert gaps[worst] <= TOLERANCE
