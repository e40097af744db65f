"""A stream goes on where a job was interrupted: with the samples and the random numbers of the undisturbed job."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mtrain.core.samples.sampler import Shares
from mtrain.rank.script.reading.stream import Stream

EPOCH, BATCH = 1, 4


class Noisy:
    """The numbers from 0 on, each with the random numbers that were drawn for it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        for number in range(self._length):
            yield number, random.random(), np.random.random()


class Kept(Noisy):
    """The same with a state."""

    next = 0

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        while self.next < self._length:
            self.next += 1
            yield self.next - 1, random.random(), np.random.random()
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def stream(dataset: Any) -> Stream:
    return Stream(dataset, global_batch=BATCH, seed=3, shard=None, collate=list, seed_framework=lambda seed: None)


def rows(of: Stream, start: int, *, rank: int = 0, size: int = 1, accumulate: int = 1) -> list[Any]:
    batches = of.micro_batches(EPOCH, start, shares=Shares(rank=rank, size=size, shards=size, rounds=accumulate))
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_stream_continues_with_the_random_numbers_of_the_undisturbed_job(start: int) -> None:
    whole = rows(stream(Noisy(21)), 0)
    assert [row[0] for row in whole] == list(range(20))
    assert len({row[1] for row in whole}) == 20
    assert rows(stream(Noisy(21)), start) == whole[start * BATCH :]


def test_a_stream_with_a_state_continues_with_the_same_random_numbers() -> None:
    first = stream(Kept(21))
    whole = rows(first, 0)
    again = stream(Kept(21))
    again.restore({"next": 8})
    assert rows(again, 2) == whole[8:] == rows(stream(Noisy(21)), 2)


@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_divide_a_stream_whose_samples_are_those_of_one_rank(size: int, accumulate: int) -> None:
    whole = rows(stream(Noisy(21)), 0)
    parts = [rows(stream(Noisy(21)), 0, rank=rank, size=size, accumulate=accumulate) for rank in range(size)]
    assert all(len(part) == len(whole) // size for part in parts)
    assert sorted(row for part in parts for row in part) == whole
