"""Trainings whose numbers have left the range of floats are compared like all others, and the side that left it is named."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrain_trace import factors
from mtrain_trace.reading import Trace, Update
from tests.trace.test_named_causes import BEGIN, GRADIENTS, compared, rows, trace, update, whole

ROOT = Path(__file__).parents[2]
CLIP = {"before": 4.0, "limit": 1.0}
NUMBERS = [math.inf, -math.inf, math.nan, 0.0]
PARTED = ["gradients", "weights", "moments", "losses"]
PLACES = [*PARTED, "before", "limit", "lr", "pass_losses", "loss_parts", "model_norms"]


def plain_update(number: int) -> Update:
    names = {"net": 1.0, "critic": 3.0}
    return update(
        number, clips=[CLIP], loss_parts={f"loss_{name}": loss for name, loss in names.items()}, model_norms={**names}
    )


def with_number(place: str, number: float) -> Trace:
    """Return a trace of two updates, the second of which has ``number`` in one place."""
    later = plain_update(2)
    if place in later.arrays:
        names, front = list(BEGIN), "exp_avg/" if place == "moments" else ""
        arrays = {**GRADIENTS, names[1]: np.full(64, number)}
        with np.errstate(invalid="ignore"):
            later.arrays[place] = rows(arrays, front)
            later.parts[place] = whole(later.arrays[place])
    elif place in ("before", "limit"):
        later.clips[0] = {**CLIP, place: number}
    elif place == "lr":
        later.rates = [{"lr": number}]
        later.rank_rates = [later.rates]
    elif place in ("loss_parts", "model_norms"):
        getattr(later, place)["loss_net" if place == "loss_parts" else "net"] = number
        later.losses = [2.0]
    else:
        setattr(later, place, [number])
    return trace(plain_update(1), later)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_is_none_or_nothing_ends_no_comparison(place: str, number: float) -> None:
    plain, other = trace(plain_update(1), plain_update(2)), with_number(place, number)
    for a, b, side in ((plain, other, "B"), (other, plain, "A")):
        result = compared(a, b)
        if place not in PARTED:
            continue
        assert result.parting is not None
        assert result.parting.update == 2
        told = f"of {side} is {abs(number) if place != 'losses' else number:g}, that of "
        assert (told in result.sentences[0]) == (not math.isfinite(number)), result.sentences
    assert compared(other, other).parting is None


@pytest.mark.parametrize("pair", [(math.inf, math.nan), (math.inf, -math.inf), (math.nan, math.nan)])
@pytest.mark.parametrize("place", PLACES)
def test_sides_that_have_both_left_the_range_of_numbers_are_compared_to_the_end(
    place: str, pair: tuple[float, float]
) -> None:
    one, two = (with_number(place, number) for number in pair)
    assert "that of " not in " ".join(compared(one, two).sentences[:1])
    one.updates[1].losses, two.updates[1].losses = [1.0], [3.0]
    result = compared(one, two)
    assert result.parting is not None
    assert result.sentences


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_no_factor_explains_what_is_no_number(number: float) -> None:
    plain, strange = np.array([1.0, 2.0]), np.array([1.0, number])
    for x, y in ((plain, strange), (strange, plain), (strange, strange)):
        assert factors.factor_of(x, y) is None
    assert factors.factor_of(plain, 3 * plain) == pytest.approx(3)


CORES = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX")
"""Kernels of OpenBLAS, the oldest first; which of them warn about numbers without end differs."""
NEEDED = {"Sandybridge": "avx", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}


@pytest.mark.job
def test_numbers_without_end_warn_under_no_kernel_of_the_blas() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    program = (
        "import warnings; warnings.simplefilter('error'); import numpy as np; from mtrain_trace import causes\n"
        "from tests.trace import test_numbers_without_end as t\n"
        "for place in t.PLACES:\n"
        "    for pair in ((np.inf, np.nan), (np.inf, -np.inf), (np.nan, 0.0), (1e150, -1e150)):\n"
        "        t.compared(*(t.with_number(place, number) for number in pair))\n"
    )
    cores = [core for core in CORES if NEEDED.get(core, "sse3" if "sse3" in flags else "pni") in flags]
    assert cores
    for core in cores:
        environ = {**os.environ, "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (core, done.stderr)
