"""The loader: same batches for any number of workers, in order, resumable; nothing hangs and no process remains."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mtrain.core.interfaces import Loader
from mtrain.core.samples.sampler import Padded, Shuffled, rank_share
from mtrain.data.loader.pool import LIVES, ShardedLoader, WorkerPool
from mtrain.data.loader.shared_memory import ArraySpec
from mtrain.errors import DataError, SpecError, TrainingError
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.section import AugmentSpec
from mtrain.tasks.detection.source import DetectionSource

pytestmark = [pytest.mark.job, pytest.mark.smoke]


class Numbers:
    """Sample i of epoch e is an array full of 100 e + i. Slow where asked, broken where asked."""

    array = ArraySpec("images", (64, 64), "uint8")

    def __init__(self, length: int = 40, *, slow: Mapping[int, float] | None = None, bad: int = -1) -> None:
        self.length, self.slow, self.bad = length, slow or {}, bad

    def __len__(self) -> int:
        return self.length

    def sample(self, epoch: int, index: int, *, update: int = 0) -> Any:
        raise AssertionError("the loader fills")

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        return self.array.shape

    def fill(self, epoch: int, index: int, out: np.ndarray, *, update: int) -> tuple[int, int]:
        if index == self.bad:
            raise ValueError("nothing good in here")
        time.sleep(self.slow.get(index, 0.0))
        out[...] = (100 * epoch + index) % 256
        return epoch, index

    def collate(self, samples: Any) -> dict[str, np.ndarray]:
        return {"index": np.array([index for _, index in samples]), "epochs": np.array([epoch for epoch, _ in samples])}

    def describe(self, index: int) -> str:
        return f"number-{index}.txt"


def in_order(per_update: int, micro: int):
    """Indices of one rank that sees all."""

    def indices(epoch: int, update: int) -> list[np.ndarray]:
        first = update * per_update
        return [np.arange(first + a, first + a + micro) for a in range(0, per_update, micro)]

    return indices


@pytest.fixture(params=[0, 1, 3])
def workers(request: pytest.FixtureRequest) -> int:
    return request.param


def numbers(pool: WorkerPool, name: str = "train", **options: Any) -> ShardedLoader:
    """Five updates of two micro batches of four."""
    return pool.loader(name, in_order(8, 4), micro_batch=4, accumulate=2, updates_per_epoch=5, **options)


def indices(batches: Iterator[Any]) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


FOURS = [list(range(i, i + 4)) for i in range(0, 40, 4)]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_batches_are_the_same_for_any_number_of_workers(annotations: Annotations) -> None:
    source = DetectionSource(annotations, image_size=96, augment=AugmentSpec(mixup=0.3), seed=1)
    order = Shuffled(len(source), global_batch=4, seed=0)

    def share(epoch: int, update: int) -> list[np.ndarray]:
        return rank_share(order.global_batch_indices(epoch, update), rank=0, size=1, accumulate=2)

    def batches(workers: int) -> list[dict[str, np.ndarray]]:
        with closing(WorkerPool({"train": source}, workers=workers)) as pool:
            loader = pool.loader("train", share, micro_batch=2, accumulate=2, updates_per_epoch=3, epochs=2)
            return [{k: v.copy() for k, v in b.items()} for epoch in (0, 1) for b in loader.micro_batches(epoch)]

    expected = [
        {**source.collate([source.sample(epoch, int(i), update=update) for i in micro]), "epoch": np.array([epoch])}
        for epoch in (0, 1)
        for update in range(3)
        for micro in share(epoch, update)
    ]
    for count in (0, 1, 3):
        actual = batches(count)
        assert len(actual) == len(expected)
        for batch, wanted in zip(actual, expected, strict=True):
            assert batch.keys() == wanted.keys()
            assert {key: array.dtype for key, array in batch.items()} == {k: a.dtype for k, a in wanted.items()}
            assert all(np.array_equal(batch[key], wanted[key]) for key in wanted)


def test_batches_come_in_job_order_whatever_the_timing(workers: int) -> None:
    slow = {0: 0.1, 5: 0.05, 12: 0.05}
    with closing(WorkerPool({"train": Numbers(slow=slow)}, workers=workers)) as pool:
        loader = numbers(pool, epochs=2)
        assert isinstance(loader, Loader)
        for epoch in (0, 1):
            for batch, wanted in zip(loader.micro_batches(epoch), FOURS, strict=True):
                assert batch["index"].tolist() == wanted
                assert batch["epochs"].tolist() == [epoch] * 4
                assert batch["images"][:, 3, 3].tolist() == [100 * epoch + i for i in wanted]


def test_an_epoch_can_begin_anywhere_and_be_left_anywhere(workers: int) -> None:
    with closing(WorkerPool({"train": Numbers()}, workers=workers)) as pool:
        loader = numbers(pool, epochs=9)
        assert indices(loader.micro_batches(0, 3)) == FOURS[6:]
        left = loader.micro_batches(1)
        assert [next(left)["index"].tolist() for _ in range(3)] == FOURS[:3]
        assert indices(loader.micro_batches(1, 2)) == FOURS[4:]  # goes on elsewhere
        assert indices(loader.micro_batches(5, 4)) == FOURS[8:]  # jumps
        assert indices(loader.micro_batches(2)) == FOURS  # goes back
        assert list(loader.micro_batches(3, 5)) == []


def test_a_batch_lives_through_two_further_calls(workers: int) -> None:
    with closing(WorkerPool({"train": Numbers()}, workers=workers)) as pool:
        loader = numbers(pool, epochs=3, prefetch=1)
        weights: list[tuple[np.ndarray, np.ndarray]] = []
        for epoch in (0, 1, 2):
            for batch in loader.micro_batches(epoch):
                time.sleep(0.003)  # workers run ahead
                weights.append((batch["images"], batch["images"].copy()))
                for view, copy in weights[-1 - LIVES :]:
                    assert np.array_equal(view, copy)
        assert any(
            not np.array_equal(view, copy) for view, copy in weights[: -1 - LIVES]
        )  # and the memory is used again


class Noted(Numbers):
    """Leaves a file for each sample that is made."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def fill(self, epoch: int, index: int, out: np.ndarray, *, update: int) -> tuple[int, int]:
        made = super().fill(epoch, index, out, update=update)
        (self.folder / f"{epoch}-{index}").touch()
        return made

    def wait_for(self, epoch: int, indices: Iterable[int]) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"{epoch}-{index}").exists() for index in indices):
            assert time.monotonic() < deadline, "nothing was prepared"
            time.sleep(0.01)


def test_a_batch_lives_through_two_further_calls_where_the_loader_jumps() -> None:
    with closing(WorkerPool({"train": Numbers()}, workers=1)) as pool:
        loader = numbers(pool, epochs=9, prefetch=1)
        batches = loader.micro_batches(0)
        first = next(batches)["images"]
        copy = first.copy()
        next(batches)
        next(loader.micro_batches(5, 2))
        next(numbers(pool).micro_batches(0))  # the one worker has then done what was asked of it before
        assert np.array_equal(first, copy)


def test_the_next_epoch_is_prepared_at_the_end_of_this_one(tmp_path: Path) -> None:
    source = Noted(tmp_path)
    with closing(WorkerPool({"train": source}, workers=1)) as pool:
        alone = numbers(pool, epochs=1)
        assert indices(alone.micro_batches(0)) == FOURS
        alone.close()
        assert list(tmp_path.glob("1-*")) == [], "there is no other epoch"
        loader = numbers(pool, epochs=2)
        assert indices(loader.micro_batches(0)) == FOURS
        source.wait_for(1, FOURS[0])


def test_training_and_evaluation_share_the_workers(workers: int) -> None:
    order = Padded(10, size=2, micro_batch=3)
    shares = list(order.micro_batches(1))
    with closing(WorkerPool({"train": Numbers(), "val": Numbers(10)}, workers=workers)) as pool:
        train = numbers(pool, epochs=2)
        evaluate = pool.loader("val", lambda _, u: [shares[u]], micro_batch=3, updates_per_epoch=order.batches_per_rank)
        training = train.micro_batches(0)
        assert next(training)["index"].tolist() == FOURS[0]
        for _ in range(2):
            assert indices(evaluate.micro_batches(0)) == [share.tolist() for share in shares]
        assert indices(training) == FOURS[1:]
        assert indices(train.micro_batches(1)) == FOURS


def test_places_come_back_when_a_loader_is_closed(workers: int) -> None:
    with closing(WorkerPool({"train": Numbers()}, workers=workers, ring_bytes=64 * 64 * 4 * 16)) as pool:
        for _ in range(5):
            loader, other = numbers(pool), numbers(pool)
            with pytest.raises(SpecError, match=r"data.prefetch: .* do not fit"):
                pool.loader("train", in_order(8, 4), micro_batch=40, updates_per_epoch=5)
            next(loader.micro_batches(0))
            assert indices(other.micro_batches(0)) == FOURS
            loader.close()
            loader.close()
            other.close()


def test_a_bad_sample_is_an_error_with_its_file_and_traceback(workers: int) -> None:
    with closing(WorkerPool({"train": Numbers(bad=17)}, workers=workers)) as pool:
        batches = numbers(pool).micro_batches(0)
        assert [next(batches)["index"].tolist() for _ in range(4)] == FOURS[:4]
        with pytest.raises(DataError, match=r"sample 17 \(number-17.txt\)") as caught:
            next(batches)
        assert "ValueError: nothing good in here" in str(caught.value)
        assert "in fill" in str(caught.value)
        assert indices(numbers(pool).micro_batches(0, 3)) == FOURS[6:]  # the workers go on


def test_an_unreadable_image_is_named(one_image: tuple[Path, Annotations], workers: int) -> None:
    path, annotations = one_image
    path.write_bytes(path.read_bytes()[:200])
    source = DetectionSource(annotations, image_size=64)
    with closing(WorkerPool({"val": source}, workers=workers)) as pool:
        loader = pool.loader("val", lambda *_: [np.array([0])], micro_batch=1, updates_per_epoch=1)
        with pytest.raises(DataError, match=r"sample 0 \(.*one.png\): .*one.png"):
            next(loader.micro_batches(0))


@pytest.mark.timeout(120)  # an unnoticed worker is waited for as long as sample 4 takes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_noticed_while_the_other_one_is_held_up(victim: int) -> None:
    # One of the two workers is held up by sample 4, the other one is idle.
    with closing(WorkerPool({"train": Numbers(slow={4: 600.0})}, workers=2)) as pool:
        batches = numbers(pool, prefetch=1).micro_batches(0)
        next(batches)
        time.sleep(0.1)
        pids = pool.pids
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(TrainingError, match=rf"process {pids[victim]} was killed by signal 9 .*data.workers"):
            list(batches)
        assert all(gone(pid) for pid in pids)
        with pytest.raises(TrainingError, match="signal 9"):
            next(numbers(pool).micro_batches(0))


def test_signals_to_the_process_group_do_not_end_workers() -> None:
    with closing(WorkerPool({"train": Numbers()}, workers=2)) as pool:
        loader = numbers(pool)
        next(loader.micro_batches(0))
        for pid in pool.pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert indices(loader.micro_batches(0)) == FOURS


def test_signals_that_come_before_a_worker_has_begun_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, in_child = os.fork, []

    def fork_that_holds_the_child_up() -> int:
        pid = fork()
        if pid == 0:
            time.sleep(0.3)
        else:
            in_child.append(pid)
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", fork_that_holds_the_child_up)
    with closing(WorkerPool({"train": Numbers()}, workers=2)) as pool:
        assert pool.pids == in_child
        assert indices(numbers(pool).micro_batches(0)) == FOURS


def open_files() -> set[tuple[str, str]]:
    """Number and target of each descriptor of this process; a pipe or a socket has a target of its own."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_closing_leaves_no_process_and_no_descriptor() -> None:
    gc.collect()
    before = open_files()
    children = {child.pid for child in psutil.Process().children()}
    pool = WorkerPool({"train": Numbers()}, workers=3)
    loader = numbers(pool, epochs=3)
    view = next(loader.micro_batches(0))["images"]
    pool.close()
    pool.close()
    loader.close()
    # What other tests have left may end meanwhile.
    assert not {child.pid for child in psutil.Process().children()} - children
    assert not open_files() - before
    assert view[0, 0, 0] == 0  # memory outlives the pool


@pytest.mark.parametrize("how", ["kill -9", "exception", "exit"])
def test_workers_end_with_their_parent(how: str) -> None:
    endings = {"kill -9": "os.kill(os.getpid(), 9)", "exception": "raise SystemExit(3)", "exit": "os._exit(0)"}
    script = f"""
        import os, sys, time
        sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
        from test_loading import Numbers, WorkerPool, numbers
        pool = WorkerPool({{"train": Numbers(slow={{30: 0.5}})}}, workers=2)
        next(numbers(pool).micro_batches(0))
        print(*pool.pids, flush=True)
        {endings[how]}
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in child.stdout.split()]
    assert len(pids) == 2, child.stderr
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(gone(pid) for pid in pids)


def test_more_tasks_than_the_pipe_takes_are_all_done() -> None:
    source = Numbers(6000)
    with closing(WorkerPool({"train": source}, workers=2)) as pool:
        loader = pool.loader("train", in_order(1500, 1500), micro_batch=1500, updates_per_epoch=4, prefetch=4)
        actual = [batch["index"] for batch in loader.micro_batches(0)]
    assert np.array_equal(np.concatenate(actual), np.arange(6000))
