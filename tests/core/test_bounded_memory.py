"""What a rank keeps of its updates does not grow with them: counted in bytes of Python's own objects."""

import gc
import tracemalloc

import pytest

from mtrain.core.network import noise
from mtrain.core.state.trace import MOST_SHARES, Shares


def held_after(updates: int, once) -> int:
    """Bytes that are held after so many updates, beyond what there was before the first one."""
    noise._shard_seeds.cache_clear()
    once(0)
    gc.collect()
    tracemalloc.start()
    for update in range(1, updates + 1):
        once(update)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


@pytest.fixture
def waits():
    shares = Shares()
    return lambda update: shares.take({"communication_s": 0.25 * update, "update_seconds": 1.0})


@pytest.mark.parametrize("updates", [2_000, 20_000])
def test_the_waits_of_a_rank_take_eight_bytes_each_of_a_bounded_number(waits, updates):
    held = held_after(updates, waits)
    print(f"{updates} updates: {held} bytes")
    assert held <= 2 * 8 * MOST_SHARES + 1024


@pytest.mark.parametrize("updates", [2_000, 20_000])
def test_the_seeds_of_updates_take_eight_bytes_each_of_a_bounded_number(updates):
    held = held_after(updates, lambda update: noise.shard_seed(5, 1, update))
    print(f"{updates} updates: {held} bytes")
    assert held <= 64 * (8 * noise.SEEDED_TOGETHER + 400) + 8192


def test_the_median_of_the_waits_is_that_of_all(waits):
    shares = Shares()
    for update in range(3 * MOST_SHARES):
        shares.take({"communication_s": 0.25 * update, "update_seconds": 1.0})
    assert shares.summary() == {"communication_share": 0.25}


def test_seeds_are_plain_numbers_of_63_bits():
    seeds = [noise.shard_seed(7, shard, update) for shard in range(3) for update in range(200)]
    assert all(type(seed) is int and 0 <= seed < 1 << 63 for seed in seeds)
    assert len(set(seeds)) == len(seeds)
