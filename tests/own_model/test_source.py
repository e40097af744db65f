"""Samples of an own data set: their random numbers belong to seed, epoch and sample, whatever was read before."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtrain.tasks.own.source import OwnSource

LENGTH = 4


class Noisy:
    """Each sample is its number with random numbers of Python, numpy and a generator of its own."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self._own = random.Random()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), np.random.random(), self._own.random()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def set_random_seed(self, seed: int) -> None:
        self._own.seed(seed)


def source(dataset: Noisy, *, seed: int = 0) -> OwnSource:
    reference: Any = SimpleNamespace(text="Noisy", file=None)
    return OwnSource(dataset, reference, split="train", seed=seed, floats=None)


def test_each_sample_is_varied_differently_in_each_epoch_and_alike_whenever_it_is_read() -> None:
    one = source(Noisy())
    first = {(epoch, index): one.sample(epoch, index)[1] for epoch in range(3) for index in range(LENGTH)}
    for place in (1, 2, 3):
        assert len({row[place] for row in first.values()}) == len(first), "every draw is another"
    again = source(Noisy())
    for epoch, index in reversed(first):
        assert again.sample(epoch, index) == (index, first[epoch, index])
    other = source(Noisy(), seed=1)
    assert not {row[1:] for row in first.values()} & {other.sample(0, index)[1][1:] for index in range(LENGTH)}


def test_a_data_set_learns_the_epoch_before_its_first_sample() -> None:
    data = Noisy()
    read = source(data)
    for epoch, index in ((0, 0), (0, 1), (1, 0), (3, 2)):
        read.sample(epoch, index)
    assert data.epochs == [0, 1, 3]
