"""The distribution of samples over ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.core.samples.sampler import Drawn, Padded, Shares, Shuffled, rank_share
from mtrain.errors import SpecError

jobs = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


@given(jobs, st.integers(0, 40), st.integers(0, 2**31 - 1), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_global_batch_is_the_same_set_however_it_is_shared(
    job: tuple[int, int, int], more: int, seed: int, epoch: int
) -> None:
    size, accumulate, micro = job
    batch = size * accumulate * micro
    order = Shuffled(batch + more, global_batch=batch, seed=seed)
    indices = order.global_batch_indices(epoch, 0)
    shares = [rank_share(indices, rank=rank, size=size, accumulate=accumulate) for rank in range(size)]
    assert all(len(share) == accumulate and all(len(part) == micro for part in share) for share in shares)
    # Micro batch a of all ranks side by side is a stretch of the global batch.
    for a in range(accumulate):
        side_by_side = np.concatenate([share[a] for share in shares])
        assert side_by_side.tolist() == indices[a * size * micro : (a + 1) * size * micro].tolist()


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_every_shard_is_computed_once_whichever_ranks_compute_it(shards: int, size: int, rounds: int) -> None:
    ranks = [Shares(rank=rank, size=size, shards=shards, rounds=rounds) for rank in range(size)]
    counted = [(rank, number) for rank in ranks for number in range(rank.passes) if rank.weight(number) > 0]
    assert len({rank.passes for rank in ranks}) == 1
    assert sorted(rank.shard(number) for rank, number in counted) == list(range(shards * rounds))
    # The mean over passes and ranks is the mean over shards.
    values = np.random.Generator(np.random.PCG64(1)).random(shards * rounds)
    terms = [rank.weight(number) * values[rank.shard(number)] for rank in ranks for number in range(rank.passes)]
    assert np.mean(terms) == pytest.approx(values.mean(), rel=1e-12)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_the_first_shard_of_each_micro_batch_moves_the_running_statistics(shards: int, size: int, rounds: int) -> None:
    first = Shares(rank=0, size=size, shards=shards, rounds=rounds)
    moving = [first.shard(number) for number in range(first.passes) if first.moves_buffers(number)]
    assert moving == [number * shards for number in range(rounds)]


@given(jobs)
@settings(max_examples=50, deadline=None)
def test_with_one_shard_for_each_rank_shares_are_those_of_the_ranks(job: tuple[int, int, int]) -> None:
    size, rounds, micro = job
    indices = np.arange(size * rounds * micro)
    for rank in range(size):
        shares = Shares(rank=rank, size=size, shards=size, rounds=rounds)
        expected = rank_share(indices, rank=rank, size=size, accumulate=rounds)
        assert [part.tolist() for part in shares.divide(indices)] == [part.tolist() for part in expected]
        assert all(shares.weight(number) == 1 and shares.moves_buffers(number) for number in range(rounds))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31 - 1))
@settings(max_examples=50, deadline=None)
def test_an_epoch_takes_no_sample_twice(length: int, batch: int, seed: int) -> None:
    if length < batch:
        with pytest.raises(SpecError, match=rf"{batch} samples per update.*has {length}; use at most {length}"):
            Shuffled(length, global_batch=batch, seed=seed)
        return
    order = Shuffled(length, global_batch=batch, seed=seed)
    records = np.concatenate([order.global_batch_indices(3, u) for u in range(order.updates_per_epoch)])
    assert len(records) == length // batch * batch
    assert len(set(records.tolist())) == len(records)
    assert records.dtype == np.int64


def test_any_batch_of_any_epoch_can_be_asked_for_in_any_order() -> None:
    forward = Shuffled(100, global_batch=10, seed=1)
    there = [forward.global_batch_indices(e, u).tolist() for e in range(3) for u in range(10)]
    backward = Shuffled(100, global_batch=10, seed=1)
    back = [backward.global_batch_indices(e, u).tolist() for e in reversed(range(3)) for u in reversed(range(10))]
    assert there == back[::-1]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(Shuffled(50, global_batch=5, seed=s).permutation(e)) for s in range(3) for e in range(3)}
    assert len(orders) == 9


def test_an_update_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError, match="update 10 is not in an epoch of 10 updates"):
        Shuffled(100, global_batch=10, seed=1).global_batch_indices(0, 10)


def test_a_share_that_does_not_divide_names_the_nearest_batches() -> None:
    with pytest.raises(SpecError, match=r"10 does not divide among 2 ranks x 2 micro batches; use 8 or 12"):
        rank_share(np.arange(10), rank=0, size=2, accumulate=2)


@given(st.integers(1, 100), st.integers(1, 5), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_evaluation_covers_every_sample_with_equal_work_on_every_rank(length: int, size: int, micro: int) -> None:
    order = Padded(length, size=size, micro_batch=micro)
    parts = [list(order.micro_batches(rank)) for rank in range(size)]
    assert {len(part) for part in parts} == {order.batches_per_rank}
    assert all(len(batch) == micro for part in parts for batch in part)
    records = np.concatenate([batch for part in parts for batch in part])
    assert set(records.tolist()) == set(range(length))
    # No rank has a whole round of padding.
    assert len(records) - length < size * micro


def test_an_empty_evaluation_split_is_refused() -> None:
    with pytest.raises(SpecError, match=r"data\.val"):
        Padded(0, size=1, micro_batch=1)


def drawn(weights: list[float], *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    order = Drawn(len(weights), global_batch=1, seed=seed)
    order.weigh(np.array(weights))
    return order.permutation(epoch)


def test_draws_are_a_function_of_seed_epoch_and_weights() -> None:
    weights = [1.0, 2.0, 3.0, 0.5] * 5
    first = drawn(weights)
    assert first.tolist() == drawn(weights).tolist()
    order = Drawn(20, global_batch=5, seed=0)
    order.weigh(np.array(weights))
    order.permutation(3)  # another epoch in between
    assert np.concatenate([order.global_batch_indices(0, update) for update in range(4)]).tolist() == first.tolist()
    others = [drawn(weights, seed=1), drawn(weights, epoch=1), drawn([1.0] * 20)]
    assert all(other.tolist() != first.tolist() for other in others)
    order.weigh(np.ones(20))
    assert order.permutation(0).tolist() == others[2].tolist()


def test_a_sample_is_drawn_as_often_as_its_weight_says() -> None:
    length = 20_000
    counts = np.bincount(drawn([0.0, 1.0, 3.0, 0.0] * (length // 4)) % 4, minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert counts[2] / length == pytest.approx(0.75, abs=0.02)


def test_each_repetition_of_a_sample_has_an_index_of_its_own() -> None:
    indices = drawn([0.0, 5.0, 1.0, 0.0, 1.0])
    assert len(set(indices.tolist())) == 5
    for sample in (1, 2, 4):
        mine = indices[indices % 5 == sample]
        assert mine.tolist() == [sample + 5 * k for k in range(len(mine))]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [1.0]])
def test_weights_that_draw_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Drawn(2, global_batch=1, seed=0).weigh(np.array(weights))
