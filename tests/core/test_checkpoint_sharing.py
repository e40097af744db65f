"""A checkpoint that only the host of rank 0 has reaches all ranks, bit for bit."""

import threading

import numpy as np
import pytest

from mtrain.core.checkpoint import sharing
from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.interfaces import Progress, State
from mtrain.errors import CheckpointError

SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, 1e-45], dtype=np.float32)


class Threads:
    """The ranks of a job as threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.values = [None] * size
        self.sent = 0


class Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank = rank
        self.size = threads.size
        self._threads = threads

    def all_gather(self, value):
        self._threads.values[self.rank] = value
        self._threads.barrier.wait()
        actual = list(self._threads.values)
        self._threads.barrier.wait()
        return actual

    def all_reduce(self, x, op):
        raise AssertionError("nothing is added up")


def on_ranks(folders):
    """``load_everywhere`` on a rank for each folder; what it returned or raised."""
    threads, actual = Threads(len(folders)), [None] * len(folders)

    def work(rank):
        try:
            actual[rank] = load_everywhere(folders[rank], Rank(threads, rank))
        except CheckpointError as error:
            actual[rank] = error

    running = [threading.Thread(target=work, args=(rank,)) for rank in range(len(folders))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return actual


def save(folder, *, value: float, update: int = 3):
    store = checkpoint.Checkpoints(folder, keep_last=9, keep_best=0, asynchronous=False)
    rng = np.random.default_rng(1)
    state = State(
        weights={"a.weight": rng.normal(size=(3, 5)).astype(np.float32), "count": np.array(7), "special": SPECIAL},
        ema={"a.weight": np.full((3, 5), value, np.float32)},
        moments={"momentum/a.weight": np.zeros((0, 5), np.float64)},
        counters={"updates": 3.0},
    )
    store.save(state, Progress(update=update, best=0.1 + 0.2), score=0.5, spec={"a": 1}, extra={"labels": ["x"]})
    return store.newest()


def same(one, other) -> None:
    assert (one.progress, one.spec, one.meta) == (other.progress, other.spec, other.meta)
    assert one.state.counters == other.state.counters
    for part in ("weights", "ema", "moments"):
        here, there = getattr(one.state, part), getattr(other.state, part)
        assert sorted(here) == sorted(there)
        for name in here:
            assert (here[name].dtype, here[name].shape) == (there[name].dtype, there[name].shape)
            assert here[name].tobytes() == there[name].tobytes()


@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
def test_ranks_without_the_folder_or_with_another_of_that_name_get_what_rank_0_has(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(sharing, "PART_BYTES", part_bytes)
    folder = save(tmp_path / "first", value=1.0)
    other = save(tmp_path / "other", value=2.0)
    actual = on_ranks([folder, tmp_path / "nowhere", other, folder])
    for each in actual:
        same(each, checkpoint.load(folder))


def test_nothing_is_sent_where_all_can_read_it(tmp_path, monkeypatch):
    folder = save(tmp_path / "shared", value=1.0)
    monkeypatch.setattr(sharing, "_send", None)
    for each in on_ranks([folder, folder]):
        same(each, checkpoint.load(folder))


def test_without_it_on_the_host_of_rank_0_every_rank_refuses(tmp_path):
    folder = save(tmp_path / "there", value=1.0)
    actual = on_ranks([tmp_path / "nowhere", folder])
    assert all(isinstance(error, CheckpointError) for error in actual)
    assert "host of rank 0" in str(actual[1])
