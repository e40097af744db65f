"""Samples are read as if each had been seeded, whether or not it was."""

import random

import numpy as np
import pytest

from mtrain.core.samples import seeds
from mtrain.data.objects import seed_by, seeded_sample
from mtrain.data.seeded_reading import SeededReader

BATCHES = [list(range(start, start + 8)) for start in range(0, 40, 8)] + [[40, 41]]


class Dataset:
    """Numbers, to which samples from ``draws_from`` on add a random one; counts how often it is read."""

    def __init__(self, draws_from: int = 10**9, draw=random.random) -> None:
        self.draws_from, self.draw = draws_from, draw
        self.reads = 0

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> float:
        self.reads += 1
        return index + (self.draw() if index >= self.draws_from else 0.0)


def nothing(word: int) -> None:
    """Seed no framework."""


def read(dataset, *, trusts: bool = True):
    """Return the samples of an epoch, and what a script draws between the batches."""
    reader = SeededReader(dataset, seed=3, seed_framework=nothing)
    for index in range(3):
        reader.sample(0, index)
    if trusts:
        reader.trust()
    between = [random.random()]
    samples = []
    for batch in reader.batches(1, BATCHES):
        samples.append(batch)
        between += [random.random(), random.gauss(), np.random.rand(), np.random.randn()]
    return samples, between


def expected(dataset):
    return [[seeded_sample(dataset, index, (3, 1, index), nothing) for index in batch] for batch in BATCHES]


@pytest.mark.parametrize("draw", [random.random, random.gauss, np.random.rand, np.random.randn])
@pytest.mark.parametrize("draws_from", [0, 5, 29, 10**9])
def test_samples_and_draws_in_between_are_those_of_seeding_for_each(draws_from, draw):
    made = Dataset(draws_from, draw)
    samples, between = read(made)
    assert samples == expected(Dataset(draws_from, draw))
    assert (samples, between) == read(Dataset(draws_from, draw), trusts=False)


def test_a_data_set_that_draws_nothing_is_read_once_and_not_seeded_for_each(monkeypatch):
    made = Dataset()
    seeded = []

    def counted(words, *more):
        seeded.append(words)
        seed_by(words, *more)

    monkeypatch.setattr("mtrain.data.seeded_reading.seed_by", counted)
    read(made)
    assert made.reads == 3 + 42
    assert len(seeded) < 42


def test_a_data_set_that_begins_to_draw_is_read_again_for_one_batch_alone():
    made = Dataset(29)
    read(made)
    assert made.reads == 3 + 42 + 8


def test_a_sample_that_fails_after_it_has_drawn_is_read_again_with_its_own_seed():
    class Failing(Dataset):
        def __getitem__(self, index: int) -> float:
            if index == 20 and random.random() != random.Random(seeds.words_of((3, 1), [20])[0][0]).random():
                raise ValueError("another number than the seeded one")
            return super().__getitem__(index)

    assert read(Failing())[0] == expected(Failing())


def test_an_error_of_a_data_set_is_its_own():
    class Failing(Dataset):
        def __getitem__(self, index: int) -> float:
            if index == 20:
                raise KeyError(index)
            return super().__getitem__(index)

    with pytest.raises(KeyError, match="20"):
        read(Failing())


def test_a_data_set_with_generators_of_its_own_is_seeded_for_each():
    class Own(Dataset):
        def set_random_seed(self, seed: int) -> None:
            self.own = random.Random(seed)

        def __getitem__(self, index: int) -> float:
            return index + self.own.random()

    assert read(Own())[0] == expected(Own())
