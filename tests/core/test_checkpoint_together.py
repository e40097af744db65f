"""Ranks write the files of a checkpoint together: the bytes of one writer, and no rank waits for one that fails."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.core.checkpoint import format, store, together
from mtrain.core.checkpoint.store import Checkpoints, CheckpointStore, NoCheckpoints
from mtrain.core.interfaces import Array, Outline, Part, Progress, State
from mtrain.errors import TrainingError

STATE = State(
    weights={"a": np.arange(1000.0, dtype=np.float32).reshape(10, 100), "count": np.array(3), "none": np.empty((0, 2))},
    ema={"a": np.arange(7.0).astype(np.float16)},
    moments={"mean/a": np.linspace(0, 1, 300_000)},
    counters={"updates": 3.0},
)


class Meeting:
    """What the ranks, each of them a thread, exchange."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class Stream:
    """Every rank holds every third stretch of 100 elements; arrays that are sent come whole."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.counters = STATE.counters
        self.outlines: Mapping[Part, Mapping[str, Outline]] = {
            part: {name: Outline(x.shape, x.dtype) for name, x in getattr(STATE, part).items()}
            for part in format.ARRAYS
        }
        self.rank = rank
        self.meeting = meeting
        self.sent = 0

    def arrays(self, part: Part, names: Sequence[str]) -> Iterator[Array | None]:
        for name in names:
            self.sent += 1
            yield getattr(STATE, part)[name] if self.rank == 0 else None

    def held(self, part: Part, names: Sequence[str]) -> Iterator[tuple[str, int, Array]]:
        for name in names:
            flat = getattr(STATE, part)[name].reshape(-1)
            for first in range(self.rank * 100, len(flat), len(self.meeting.values) * 100):
                yield name, first, flat[first : first + 100]

    def exchange(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)


def save_on(
    folder: Path, *, size: int = 3, change: Callable[[Stream], None] = lambda stream: None
) -> list[tuple[Stream, str]]:
    """Save on all ranks; return the stream and the error of each. ``change``: how a rank's stream differs."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        stream = Stream(rank, meeting)
        change(stream)
        checkpoints: CheckpointStore = NoCheckpoints()
        if rank == 0:
            checkpoints = Checkpoints(folder, keep_last=9, keep_best=0, asynchronous=False)
        try:
            checkpoints.save(stream, Progress(update=1), score=None, spec={}, extra={})
            results[rank] = stream, ""
        except Exception as error:
            results[rank] = stream, f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_files_are_those_of_one_writer(tmp_path: Path, size: int) -> None:
    alone = Checkpoints(tmp_path / "alone", keep_last=1, keep_best=0, asynchronous=False)
    alone.save(STATE, Progress(update=1), score=None, spec={}, extra={})
    results = save_on(tmp_path / "together", size=size)
    assert [(stream.sent, error) for stream, error in results] == [(0, "")] * size, "nothing is sent"
    files = sorted((tmp_path / "alone" / "step-00000001").iterdir())
    assert len(files) == 5
    assert [path.read_bytes() for path in files] == [
        (tmp_path / "together" / "step-00000001" / path.name).read_bytes() for path in files
    ]
    assert store.verify(tmp_path / "together" / "step-00000001") == []


def test_ranks_that_do_not_all_see_the_folder_send_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = together._mark
    here = threading.local()
    monkeypatch.setattr(together, "_mark", lambda folder: "" if getattr(here, "away", False) else original(folder))

    def away(stream: Stream) -> None:
        here.away = stream.rank == 2

    results = save_on(tmp_path, change=away)
    arrays = sum(map(len, results[0][0].outlines.values()))
    assert [(stream.sent, error) for stream, error in results] == [(arrays, "")] * 3
    assert store.verify(tmp_path / "step-00000001") == []


def failing(rank: int) -> Callable[[Stream], None]:
    def held(*_: Any) -> Iterator[tuple[str, int, Array]]:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda stream: setattr(stream, "held", held) if stream.rank == rank else None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_disk_that_is_full_for_one_rank_is_told_by_rank_0(tmp_path: Path, rank: int) -> None:
    errors = [error for _, error in save_on(tmp_path, change=failing(rank))]
    assert errors[1:] == ["", ""]
    assert errors[0].startswith(f"{TrainingError.__name__}: checkpoint step-00000001 could not be written")
    assert "No space left on device" in errors[0]
    assert list(tmp_path.iterdir()) == []
    assert [error for _, error in save_on(tmp_path)] == ["", "", ""], "the ranks are in step"


def test_nobody_waits_for_a_rank_0_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_make_room", full)
    errors = [error for _, error in save_on(tmp_path)]
    assert errors[1:] == ["", ""]
    assert "No space left on device" in errors[0]


def test_a_part_that_nobody_wrote_is_not_taken_for_zeros(tmp_path: Path) -> None:
    errors = [
        error
        for _, error in save_on(tmp_path, change=lambda s: setattr(s, "held", lambda *_: iter(())) if s.rank else None)
    ]
    assert all("AssertionError: ranks wrote" in error for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_ranks_tell_each_other_that_they_live_while_one_writes_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "BEAT_S", 0.01)
    exchanged = []

    def slow(stream: Stream) -> None:
        held, exchange = stream.held, stream.exchange
        if stream.rank == 1:
            stream.held = lambda *given: time.sleep(0.1) or held(*given)  # type: ignore[method-assign, func-returns-value]
            stream.exchange = lambda value: exchanged.append(value) or exchange(value)  # type: ignore[method-assign, func-returns-value]

    assert [error for _, error in save_on(tmp_path, change=slow)] == ["", "", ""]
    assert len(exchanged) > 5
    assert store.verify(tmp_path / "step-00000001") == []
