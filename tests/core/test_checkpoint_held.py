"""A command that reads a run which is being trained: what it has chosen stays, and what is deleted meanwhile is no answer."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import format as files
from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.core.state.streams import WholeStream
from mtrain.errors import TrainingError


def save(checkpoints: Checkpoints, update: int, score: float | None = None) -> None:
    state = State(weights={"w": np.full(4, update, dtype=np.float32)})
    checkpoints.save(state, Progress(update=update), score=score, spec={}, extra={})
    checkpoints.wait()


def opened(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep_last=1, keep_best=0, asynchronous=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("choose", [store.newest, store.best])
def test_a_chosen_checkpoint_stays_as_long_as_it_is_read(tmp_path: Path, choose) -> None:
    checkpoints = opened(tmp_path)
    save(checkpoints, 1, 0.5)
    with store.holding():
        chosen = choose(tmp_path)
        for update in (2, 3):
            save(checkpoints, update, 0.4)
        assert files.verify(chosen) == []
        assert names(tmp_path) == ["step-00000001", "step-00000003"]
    save(checkpoints, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_who_asks_for_nothing_holds_nothing(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    assert store.newest(tmp_path) is not None
    save(checkpoints, 2)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.job
def test_another_process_that_reads_and_dies_lets_go(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    code = (
        "import sys; from pathlib import Path; from mtrain.core.checkpoint import store\n"
        "with store.holding(): print(store.newest(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        assert "step-00000001" in reader.stdout.readline()
        save(checkpoints, 2)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
    finally:
        reader.kill()
        reader.communicate()
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("when", ["verify", "_hold"])
def test_one_that_is_deleted_while_it_is_chosen_is_passed_over_without_a_word(
    tmp_path: Path, monkeypatch, caplog, when: str
) -> None:
    checkpoints, moments = opened(tmp_path), [1]
    save(checkpoints, 1)
    original = getattr(store, when)

    def after_a_save(path: Path):
        if moments:
            moments.pop()
            save(checkpoints, 2)
        return original(path)

    monkeypatch.setattr(store, when, after_a_save)
    with store.holding():
        assert store.newest(tmp_path) == tmp_path / "step-00000002"
    assert "damaged" not in caplog.text


def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, caplog) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0, asynchronous=False)
    save(checkpoints, 1)
    save(checkpoints, 2)
    (tmp_path / "step-00000002" / files.STATE).write_text("{")
    with store.holding():
        assert store.newest(tmp_path) == tmp_path / "step-00000001"
    assert "step-00000002 is damaged and passed over" in caplog.text


def test_a_reader_finds_an_intact_one_at_every_moment_of_a_job_that_keeps_one(tmp_path: Path) -> None:
    checkpoints, ended = opened(tmp_path), threading.Event()
    save(checkpoints, 1)

    def train() -> None:
        for update in range(2, 60):
            save(checkpoints, update)
        ended.set()

    writer = threading.Thread(target=train)
    writer.start()
    looks = 0
    while not ended.is_set() or not looks:
        with store.holding():
            chosen = store.newest(tmp_path)
            assert chosen is not None
            assert files.read_description(chosen)["progress"]["update"] == store.update_named(chosen)
            assert files.verify(chosen) == []
        looks += 1
    writer.join()


class Split(WholeStream):
    """A stream that counts what is read of it, since other ranks send their parts as long as somebody reads."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.read: list[str] = []

    def arrays(self, part, names):
        for name, array in zip(names, super().arrays(part, names), strict=True):
            self.read.append(f"{part}/{name}")
            yield array


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("no array")], ids=["disk", "other"]
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", ["header", "second array", "manifest", "folder"])
def test_a_save_that_fails_reads_what_the_other_ranks_send_to_its_end(
    tmp_path: Path, monkeypatch, failing: str, asynchronous: bool, error: Exception
) -> None:
    """Else they would wait for rank 0, whose disk is full, for ever."""
    calls: list[None] = []

    def fails(*arguments, **options):
        calls.append(None)
        if failing == "second array" and len(calls) < 3:
            return original(*arguments, **options)
        raise error

    name = {"header": "open_to_write", "second array": "_write_all", "manifest": "_digest_of", "folder": "write"}[
        failing
    ]
    owner = files.outputs if name == "open_to_write" else files
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0, asynchronous=asynchronous)
    stream = Split(State(weights={name: np.ones(3, np.float32) for name in "abc"}, ema={"a": np.ones(3, np.float32)}))

    def save_it() -> None:
        checkpoints.save(stream, Progress(update=1), score=None, spec={}, extra={})
        checkpoints.wait()

    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(TrainingError if isinstance(error, OSError) else ValueError, match=r"No space|no array"):
            save_it()
    assert sorted(stream.read) == ["ema/a", "weights/a", "weights/b", "weights/c"]
    assert names(tmp_path) == []
    save_it()
    assert names(tmp_path) == ["step-00000001"]
