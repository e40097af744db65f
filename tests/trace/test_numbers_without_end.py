"""Trainings whose numbers have left the range of floats are compared like all others, and the side that left it is named."""

import math

import numpy as np
import pytest

from mtrain_trace.reading import Trace
from tests.trace.test_named_causes import BEGIN, GRADIENTS, compared, rows, trace, update, whole

CLIP = {"before": 4.0, "limit": 1.0}
NUMBERS = [math.inf, -math.inf, math.nan, 0.0]
PARTED = ["gradients", "weights", "moments", "losses"]
PLACES = [*PARTED, "before", "limit", "lr", "pass_losses"]


def with_number(place: str, number: float) -> Trace:
    """Return a trace of two updates, the second of which has ``number`` in one place."""
    later = update(2, clips=[CLIP])
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
    else:
        setattr(later, place, [number])
    return trace(update(1, clips=[CLIP]), later)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_is_none_or_nothing_ends_no_comparison(place: str, number: float) -> None:
    plain, other = trace(update(1, clips=[CLIP]), update(2, clips=[CLIP])), with_number(place, number)
    for a, b, side in ((plain, other, "B"), (other, plain, "A")):
        result = compared(a, b)
        if place not in PARTED:
            continue
        assert result.parting is not None
        assert result.parting.update == 2
        told = f"of {side} is {abs(number) if place != 'losses' else number:g}, that of "
        assert (told in result.sentences[0]) == (not math.isfinite(number)), result.sentences
    assert compared(other, other).parting is None
