"""The words of many keys at once are those of numpy's class."""

import numpy as np
import pytest

from mtrain.core.network.noise import shard_seed
from mtrain.core.samples import seeds


@pytest.mark.parametrize("prefix", [(0, 0), (7, 12), (2**32 - 1, 3), (5,), (1, 2, 3), (2**40, 1), (1, 2, 3, 4), ()])
def test_the_words_are_those_of_numpy(prefix):
    numbers = [0, 1, 2, 77, 2**31, 2**32 - 1, *np.random.default_rng(0).integers(0, 2**32, 200).tolist()]
    expected = [np.random.SeedSequence([*prefix, number]).generate_state(4).tolist() for number in numbers]
    assert seeds.words_of(prefix, numbers) == expected


def test_numbers_of_more_than_32_bits_are_taken_too():
    expected = [np.random.SeedSequence([1, 2, number]).generate_state(4).tolist() for number in (3, 2**33)]
    assert seeds.words_of((1, 2), [3, 2**33]) == expected


def test_no_numbers_have_no_words():
    assert seeds.words_of((1, 2), []) == []


@pytest.mark.parametrize("seed", [0, 12345, 2**33])
def test_the_seed_of_a_shard_is_numpys_whichever_updates_were_asked_for_before(seed):
    for shard, update in ((0, 0), (3, 64), (3, 1), (0, 63), (0, 100_000)):
        expected = np.random.SeedSequence([seed, shard, update]).generate_state(1, np.uint64)[0]
        assert shard_seed(seed, shard, update) == int(expected) >> 1
