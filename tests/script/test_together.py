"""Data sets that are read side by side, without a framework: which batches of each an update takes."""

import itertools
from typing import Any

import numpy as np
import pytest

from mtrain.core.samples.sampler import Shares
from mtrain.rank.script.reading.loaders import Selection
from mtrain.rank.script.reading.samples import Samples

FIRST, SECOND, THIRD = 8, 15, 6
"""Lengths: 4 updates of 2 in an epoch of the first, 5 of 3 in one of the second, 1 of 4 in one of the third."""
UPDATES = 16


def together(order_of_second: Any = None) -> Samples:
    def samples(length: int, batch: int, seed: int, order: Any = None) -> Samples:
        selection = Selection(dataset=np.arange(length), batch=batch, order=order, collate=list)
        return Samples(selection, seed=seed, seed_framework=lambda seed: None)

    first = samples(FIRST, 2, 1)
    first.read_with([samples(SECOND, 3, 2, order_of_second), samples(THIRD, 4, 3)], tuple)
    return first


def updates_from(update: int, *, rank: int = 0, size: int = 1) -> list[Any]:
    """Return the micro batches of a rank from an update of the job to its end."""
    data, batches = together(), []
    shares = Shares(rank=rank, size=size, shards=size, rounds=1)
    while len(batches) < UPDATES - update:
        epoch, start = data.place(update + len(batches))
        batches += data.micro_batches(epoch, start, shares=shares)
    return batches


@pytest.mark.parametrize("start", range(UPDATES))
def test_a_job_that_begins_again_at_any_update_reads_what_the_undisturbed_one_reads(start):
    assert updates_from(start) == updates_from(0)[start:]


def test_each_data_set_begins_again_after_all_of_its_batches_and_in_a_new_order():
    batches = updates_from(0)
    for place, (length, batch) in enumerate([(FIRST, 2), (SECOND, 3), (THIRD, 4)]):
        numbers = [int(number) for update in batches for number in update[place]]
        each = length // batch * batch
        epochs = [numbers[begin : begin + each] for begin in range(0, len(numbers) - each + 1, each)]
        assert all(len(set(epoch)) == each for epoch in epochs), "no sample comes twice in an epoch"
        assert len(epochs) > 2
        assert all(one != following for one, following in itertools.pairwise(epochs)), "each in another order"


def test_the_shares_of_two_ranks_are_those_of_one_rank():
    # A batch of 3 does not divide: the second data set is left to one rank.
    one, ranks = updates_from(5), [updates_from(5, rank=rank, size=2) for rank in range(2)]
    for place in (0, 2):
        assert [sorted(both[0][place] + both[1][place]) for both in zip(*ranks, strict=True)] == [
            sorted(u[place]) for u in one
        ]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_order_of_a_further_data_set_is_part_of_what_ranks_compare(epoch):
    def mark(order: Any) -> int:
        data = together(order)
        next(data.micro_batches(epoch, 0, shares=Shares(rank=0, size=1, shards=1, rounds=1)))
        return data.order(epoch)

    assert mark(lambda at: range(SECOND)) == mark(lambda at: range(SECOND))
    assert mark(lambda at: range(SECOND)) != mark(lambda at: range(SECOND)[::-1])
