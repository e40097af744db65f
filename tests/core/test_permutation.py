"""The order of very many samples, which no rank holds as a list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.core.samples.permutation import Permutation
from mtrain.core.samples.sampler import LISTED, Shuffled

LENGTH = 1_000_003


@given(st.integers(1, 3000), st.integers(0, 2**31 - 1), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_every_number_comes_once(length: int, seed: int, epoch: int) -> None:
    order = Permutation.of(length, seed=seed, epoch=epoch)
    assert sorted(order[0:length].tolist()) == list(range(length))
    assert order[length // 3 : length // 2].tolist() == order[0:length][length // 3 : length // 2].tolist()


def spread(first: np.ndarray, second: np.ndarray) -> float:
    """Return chi-squared per degree of freedom of two numberings against each other, on 50 x 50 cells; about 1 by chance."""
    counts, expected = np.histogram2d(first, second, bins=50)[0], len(first) / 2500
    return float(((counts - expected) ** 2 / expected).sum() / 2401)


def test_the_order_looks_like_chance() -> None:
    order = Permutation.of(LENGTH, seed=1, epoch=0)[0:LENGTH]
    positions, following = np.arange(LENGTH), Permutation.of(LENGTH, seed=1, epoch=1)[0:LENGTH]
    deviation = (2 / 2401) ** 0.5
    for second in (positions, np.roll(order, 1), np.roll(order, 256), following):
        assert abs(spread(order, second) - 1) < 4 * deviation
    assert spread(positions, positions) > 100  # what the test would say of no order at all
    assert (order == following).sum() < 10


def test_the_golden_numbers_of_a_thousand_million_samples() -> None:
    order = Shuffled(10**9, global_batch=4, seed=7)
    assert order.updates_per_epoch == 250_000_000
    assert order.global_batch_indices(2, 0).tolist() == FIRST
    assert order.global_batch_indices(2, 249_999_999).tolist() == LAST


FIRST = [187649380, 615315276, 446295860, 627249999]
LAST = [697575126, 144016760, 952585086, 285968103]


@pytest.mark.parametrize(("length", "is_list"), [(1000, True), (LISTED + 1, False)])
def test_a_list_of_all_samples_is_made_up_to_a_length_alone(length: int, is_list: bool) -> None:
    assert isinstance(Shuffled(length, global_batch=4, seed=7).permutation(0), np.ndarray) is is_list
