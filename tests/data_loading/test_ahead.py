"""How many loader processes there are and how far they work ahead: by cores, time and memory; samples stay the same."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from mtrain.data.loader.ahead import COVERED_S, LEAST, MOST, Ahead
from mtrain.data.loader.pool import LIVES, WorkerPool
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.data.loader.workers import pipe_bytes
from mtrain.rank.spec import assembly
from mtrain.spec import bounds
from mtrain.spec.model import Spec
from mtrain.system import placement

pytestmark = pytest.mark.smoke


class Clock:
    """A clock that goes only when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def after(uses: list[float], *, accumulate: int = 1, most: int = MOST, waits: float = 0.0) -> int:
    """Return the number ahead after micro batches that were used for so many seconds."""
    clock = Clock()
    ahead = Ahead("auto", most=most, accumulate=accumulate, clock=clock)
    assert ahead.count == min(LEAST, most)
    for seconds in uses:
        ahead.ask()
        clock.now += waits
        ahead.receive()
        clock.now += seconds
    ahead.ask()
    return ahead.count


def test_the_number_ahead_covers_a_time() -> None:
    assert after([0.125] * 20) == COVERED_S / 0.125
    assert after([0.3] * 20) == 7
    assert after([5.0] * 20) == LEAST
    assert after([0.0001] * 20) == MOST
    assert after([0.125] * 20, most=9) == 9
    assert after([5.0] * 20, most=2) == 2


def test_waiting_for_data_and_pauses_are_no_use_of_a_batch() -> None:
    assert after([0.125] * 20, waits=3.0) == COVERED_S / 0.125
    assert after([0.125] * 10 + [600.0] + [0.125] * 3) == COVERED_S / 0.125


def test_a_device_that_waits_once_in_an_update_is_measured_by_the_update() -> None:
    assert after([0.0, 0.0, 0.0, 0.5] * 10, accumulate=4) == COVERED_S / 0.125


def test_a_change_of_speed_is_followed() -> None:
    assert after([0.125] * 20 + [0.5] * 20) == LEAST
    assert after([0.5] * 20 + [0.125] * 20) == COVERED_S / 0.125


def test_a_number_that_is_given_stays() -> None:
    clock = Clock()
    ahead = Ahead(3, most=1, clock=clock)
    for _ in range(20):
        ahead.ask()
        ahead.receive()
        clock.now += 0.001
    assert ahead.count == ahead.most == 3


def spec_of(ranks: int, *, workers: Any = "auto") -> Spec:
    return Spec.model_validate({"data": {"workers": workers}, "cluster": {"nproc_per_node": ranks}})


class Filled:
    """Sample i of epoch e is an array full of 7 e + i."""

    array = ArraySpec("images", (32, 32), "uint8")

    def __len__(self) -> int:
        return 4000

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        return self.array.shape

    def sample(self, epoch: int, index: int, *, update: int = 0) -> Any:
        raise AssertionError("the loader fills")

    def fill(self, epoch: int, index: int, out: np.ndarray, *, update: int) -> int:
        out[...] = (7 * epoch + index) % 256
        return index

    def collate(self, samples: Any) -> dict[str, np.ndarray]:
        return {"index": np.array(samples)}

    def describe(self, index: int) -> str:
        return str(index)


def batches(clock: Clock, *, use_s: float, prefetch: Any = "auto", updates: int = 60) -> Iterator[tuple[Any, Any]]:
    """Yield each batch of two epochs with the loader."""
    with closing(WorkerPool({"train": Filled()}, workers=1)) as pool:
        loader = pool.loader(
            "train",
            lambda epoch, update: [np.arange(4 * update, 4 * update + 4)],
            micro_batch=4,
            updates_per_epoch=updates,
            prefetch=prefetch,
            epochs=2,
        )
        loader._target._clock = clock
        for epoch in (0, 1):
            for batch in loader.micro_batches(epoch):
                yield batch, loader
                clock.now += use_s


@pytest.mark.job
def test_more_batches_are_in_flight_where_they_are_used_fast_and_all_are_the_same() -> None:
    fast = [(b["images"].copy(), b["index"].copy(), len(each._ahead)) for b, each in batches(Clock(), use_s=0.125)]
    slow = [(b["images"].copy(), b["index"].copy(), len(each._ahead)) for b, each in batches(Clock(), use_s=9.0)]
    fixed = [(b["images"].copy(), b["index"].copy()) for b, _ in batches(Clock(), use_s=0.125, prefetch=1)]
    assert max(count for *_, count in fast) == COVERED_S / 0.125
    assert {count for *_, count in slow[:100]} == {LEAST}
    for one, other, third in zip(fast, slow, fixed, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[0], third[0])
        assert np.array_equal(one[1], third[1])


@pytest.mark.job
def test_places_that_are_not_needed_take_no_memory() -> None:
    starts = set()
    for _, loader in batches(Clock(), use_s=9.0):
        starts |= {job.start for job in loader._ahead} | set(loader._in_use)
    assert len(starts) <= LEAST + LIVES + 2


@pytest.mark.job
def test_memory_bounds_the_batches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 4 * Filled.array.nbytes
    monkeypatch.setattr(bounds, "available_bytes", lambda: round(20 * nbytes / assembly.AHEAD_SHARE))

    def most(ranks: int) -> int:
        with closing(assembly.made_pool({"train": Filled()}, spec_of(ranks))) as pool:
            loader = pool.loader(
                "train", lambda *_: [np.arange(4)], micro_batch=4, updates_per_epoch=1, prefetch="auto"
            )
            return loader._target.most

    assert [most(ranks) for ranks in (1, 2, 100)] == [20, 10, 1]


def workers(ranks: int, *, given: Any = "auto") -> int:
    return assembly.loader_workers(spec_of(ranks, workers=given))


def test_loader_processes_share_the_cores_and_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, free = 96, 1 << 40
    monkeypatch.setattr(placement, "usable_cores", lambda: cores)
    monkeypatch.setattr(bounds, "available_bytes", lambda: free)
    assert [workers(ranks) for ranks in (1, 4, 8, 96, 200)] == [95, 23, 11, 1, 1]
    assert workers(8, given=3) == 3
    assert workers(8, given=0) == 0
    free = 2 * 8 * 5 * assembly.LOADER_BYTES
    assert [workers(ranks) for ranks in (1, 8, 96)] == [40, 5, 1]
    cores = 1
    assert workers(1) == 1


def test_the_pipes_of_many_processes_stay_within_the_limit_of_a_user() -> None:
    assert [pipe_bytes(count) >> 10 for count in (1, 8, 9, 16, 31, 95, 1024)] == [1024, 1024, 512, 512, 256, 64, 64]
    assert all(ranks * 8 * pipe_bytes(8) <= 64 << 20 for ranks in (1, 8))


@pytest.mark.job
def test_many_processes_give_the_same_samples() -> None:
    def digests(workers: int) -> list[bytes]:
        with closing(WorkerPool({"train": Filled()}, workers=workers)) as pool:
            loader = pool.loader(
                "train", lambda _, k: [np.arange(4 * k, 4 * k + 4)], micro_batch=4, updates_per_epoch=50
            )
            return [batch["images"].tobytes() for batch in loader.micro_batches(0)]

    assert digests(24) == digests(1)
