"""Checkpoints: complete or absent, verified, kept by rule, written beside the loop."""

import errno
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import format
from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.checkpoint.background import Beside
from mtrain.core.checkpoint.store import Checkpoints, NoCheckpoints
from mtrain.core.interfaces import Progress, State
from mtrain.core.update.cadence import count_score
from mtrain.errors import CheckpointError, TrainingError

pytestmark = pytest.mark.smoke

SPEC = {"model": {"name": "yolov5n"}, "train": {"seed": 3}}


def make_state(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    return State(
        weights={
            "body.0.weight": random.standard_normal((4, 3, 2), dtype=np.float32),
            "body.0.count": np.array(7, dtype=np.int64),
            "double": random.standard_normal(5),
            'odd "name"/ü \n__metadata__': np.ones((0, 3), dtype=np.float32),
            "__metadata__": np.array([True, False]),
        },
        ema={"body.0.weight": random.standard_normal((4, 3, 2), dtype=np.float32)},
        moments={"momentum/body.0.weight": random.standard_normal((2, 3, 4), dtype=np.float32).transpose(2, 1, 0)},
        counters={"updates": 12.0, "loss_scale": float("inf"), "skipped": 0.1 + 0.2},
    )


def store(folder: Path, *, keep_last: int = 2, keep_best: int = 1, asynchronous: bool = False) -> Checkpoints:
    return Checkpoints(folder, keep_last=keep_last, keep_best=keep_best, asynchronous=asynchronous)


def save(checkpoints: Checkpoints, update: int, *, score: float | None = None, seed: int = 0) -> Path:
    progress = Progress(update=update, epoch=2, position=update % 7, samples=8 * update)
    checkpoints.save(make_state(seed), progress, score=score, spec=SPEC, extra={"details": {"anchors": [1.5, 2.0]}})
    return checkpoints.folder / f"step-{update:08d}"


def assert_equal(left: State, right: State) -> None:
    for part in ("weights", "ema", "moments"):
        a, b = getattr(left, part), getattr(right, part)
        assert list(a) == list(b) or set(a) == set(b)
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert a[name].shape == b[name].shape
            np.testing.assert_array_equal(a[name], b[name])
    assert left.counters == right.counters


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path, asynchronous):
    checkpoints = store(tmp_path, asynchronous=asynchronous)
    path = save(checkpoints, 12, score=0.25)
    checkpoints.wait()
    saved = checkpoint.load(path)
    assert_equal(saved.state, make_state())
    assert saved.progress == Progress(update=12, epoch=2, position=5, samples=96)
    assert saved.progress.best == float("-inf")
    assert saved.spec == SPEC
    assert saved.meta["extra"] == {"details": {"anchors": [1.5, 2.0]}}
    assert saved.meta["score"] == 0.25
    assert checkpoint.verify(path) == []


def test_loaded_arrays_can_be_written_to_by_their_owner(tmp_path):
    saved = checkpoint.load(save(store(tmp_path), 1))
    copy = np.array(saved.state.weights["double"])
    copy += 1
    assert not np.array_equal(copy, saved.state.weights["double"])


def test_progress_that_changes_after_save_does_not_change_what_is_written(tmp_path):
    checkpoints = store(tmp_path, asynchronous=True)
    progress = Progress(update=5)
    checkpoints.save(make_state(), progress, score=None, spec={}, extra={})
    progress.update = 6
    checkpoints.wait()
    assert checkpoint.load(tmp_path / "step-00000005").progress.update == 5


def truncate(path: Path) -> None:
    content = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(content[:-3])


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "optimizer.safetensors").read_bytes())
    content[-5] ^= 1
    (path / "optimizer.safetensors").write_bytes(content)


def leave_out_the_manifest(path: Path) -> None:
    (path / "MANIFEST.json").unlink()


def break_the_manifest(path: Path) -> None:
    (path / "MANIFEST.json").write_text('{"files": [')


def change_the_manifest(path: Path) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps(manifest | {"score": 0.9}))


def lose_a_file(path: Path) -> None:
    (path / "ema.safetensors").unlink()


def change_the_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"epoch": 2', '"epoch": 3'))


DAMAGES = {
    truncate: "weights.safetensors: .* bytes, expected",
    flip_a_bit: "optimizer.safetensors: its SHA-256",
    leave_out_the_manifest: "half-written: it has no MANIFEST.json",
    break_the_manifest: "MANIFEST.json is damaged",
    change_the_manifest: "MANIFEST.json is damaged",
    lose_a_file: "ema.safetensors: No such file",
    change_the_state: "state.json: its SHA-256",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one_is_used(tmp_path, caplog, damage):
    checkpoints = store(tmp_path, keep_last=3)
    save(checkpoints, 1)
    intact = save(checkpoints, 2)
    broken = save(checkpoints, 3)
    damage(broken)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest() == intact
    assert "step-00000003 is damaged" in caplog.text
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        checkpoint.load(broken)


def test_no_byte_of_a_checkpoint_can_change_unnoticed(tmp_path):
    path = save(store(tmp_path), 1)
    random = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in random.integers(len(content), size=12):
            changed = bytearray(content)
            changed[place] ^= 1 << int(random.integers(8))
            file.write_bytes(changed)
            assert checkpoint.verify(path), f"{file.name} byte {place}"
        file.write_bytes(content)
    assert checkpoint.verify(path) == []


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(format, "FORMAT", 2)
    path = save(store(tmp_path), 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format is 2, this version reads 1"):
        checkpoint.load(path)


def test_without_an_intact_checkpoint_there_is_no_newest(tmp_path):
    checkpoints = store(tmp_path)
    assert checkpoints.newest() is None
    truncate(save(checkpoints, 1))
    assert checkpoints.newest() is None
    assert checkpoints.best() is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = store(tmp_path, keep_last=2, keep_best=1)
    for update, score in enumerate([0.1, 0.9, 0.3, None, float("nan"), 0.2]):
        save(checkpoints, update, score=score)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004", "step-00000005"]
    assert checkpoints.best() == tmp_path / "step-00000001"


def test_of_equal_scores_the_first_is_the_best_and_is_kept(tmp_path):
    checkpoints = store(tmp_path, keep_last=1, keep_best=1)
    for update in (1, 2, 3, 4):
        save(checkpoints, update, score=0.5 if update > 1 else 0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    assert checkpoints.best() == tmp_path / "step-00000002"


def test_a_best_checkpoint_that_is_written_again_stays_the_first_of_its_ties(tmp_path):
    """A job that goes on from an older checkpoint writes the same updates once more."""
    checkpoints = store(tmp_path, keep_last=9, keep_best=1)
    for update in (2, 3, 2):
        save(checkpoints, update, score=0.5)
    assert checkpoints.best() == tmp_path / "step-00000002"


def test_summary_and_best_checkpoint_name_the_same_update_of_equal_scores(tmp_path):
    from mtrain.rank.spec.train import Results

    scores = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4, 5: 0.5}
    checkpoints, result = store(tmp_path, keep_last=1, keep_best=1), Results(progress=Progress())
    for update, score in scores.items():
        if update == 4:  # a job that is resumed knows the metrics of its checkpoint alone
            saved = checkpoint.load(checkpoints.newest())
            checkpoints, result = store(tmp_path, keep_last=1, keep_best=1), Results.of(saved)
        progress = count_score(replace(result.progress, update=update), score)
        result.take({"score": score}, progress, Metrics())
        result.progress = progress
        extra = {"results": result.metrics()}
        checkpoints.save(make_state(), progress, score=score, spec=SPEC, extra=extra)
    assert result.best["update"] == 2
    assert checkpoints.best() == tmp_path / "step-00000002"


class Metrics:
    """The part of an evaluator that the summary reads."""

    headline = ("score",)

    def remarks(self) -> list[str]:
        return []


def test_retention_counts_no_damaged_checkpoint_and_keeps_an_intact_one(tmp_path):
    checkpoints = store(tmp_path, keep_last=1, keep_best=0)
    leave_out_the_manifest(save(checkpoints, 1))
    save(checkpoints, 2)
    truncate(tmp_path / "step-00000002")
    newest = save(checkpoints, 3)
    assert checkpoints.newest() == newest


def test_after_going_back_to_an_older_checkpoint_the_one_written_last_is_the_newest(tmp_path):
    save(store(tmp_path), 100)
    assert store(tmp_path).newest() == tmp_path / "step-00000100"
    again = store(tmp_path)
    save(again, 50)
    assert again.newest() == tmp_path / "step-00000050"


def test_saving_the_same_update_again_replaces_it(tmp_path):
    save(store(tmp_path), 5, seed=1)
    path = save(store(tmp_path), 5, seed=2)
    assert_equal(checkpoint.load(path).state, make_state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


NO_PROCESS = (1 << 22) + 1
"""A number above the largest that Linux gives to a process."""


def test_leftovers_of_dead_writers_are_removed_and_those_of_living_ones_stay(tmp_path):
    host = os.uname().nodename
    gone = tmp_path / f".tmp-step-00000009@{host}@{NO_PROCESS}"
    alive = tmp_path / f".tmp-step-00000010@{host}@{os.getppid()}"
    elsewhere = tmp_path / f".tmp-step-00000011@another-{host}@{NO_PROCESS}"
    for folder in (gone, alive, elsewhere):
        folder.mkdir()
    store(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, elsewhere.name])


def test_a_checkpoint_set_aside_by_a_writer_that_died_comes_back(tmp_path):
    path = save(store(tmp_path), 5)
    path.rename(tmp_path / f".tmp-{path.name}@{os.uname().nodename}@{NO_PROCESS}.former")
    assert store(tmp_path).newest() == path


@pytest.mark.job
def test_a_writer_killed_at_any_moment_leaves_only_intact_checkpoints(tmp_path):
    script = textwrap.dedent(
        """
        import sys, numpy as np
        from pathlib import Path
        from mtrain.core.checkpoint.store import Checkpoints
        from mtrain.core.interfaces import Progress, State
        checkpoints = Checkpoints(Path(sys.argv[1]), keep_last=2, keep_best=1, asynchronous=True)
        state = State(weights={str(i): np.full(20000, i, dtype=np.float32) for i in range(10)})
        for update in range(1, 100000):
            checkpoints.save(state, Progress(update=update), score=None, spec={}, extra={})
            print(update, flush=True)
        """
    )
    for lines in (3, 4, 6):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(lines):
            writer.stdout.readline()
        writer.kill()
        writer.communicate()
        actual = checkpoint.list_all(tmp_path)
        assert actual
        assert [checkpoint.verify(path) for path in actual] == [[]] * len(actual)
    store(tmp_path)
    assert not list(tmp_path.glob(".tmp-*"))


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.job
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_takes_no_more_ends_the_run_with_the_last_good_one_intact(tmp_path, asynchronous):
    script = textwrap.dedent(
        f"""
        import sys, numpy as np
        from pathlib import Path
        from mtrain.core.checkpoint.store import Checkpoints
        from mtrain.core.interfaces import Progress, State
        checkpoints = Checkpoints(Path(sys.argv[1]), keep_last=2, keep_best=1, asynchronous={asynchronous})
        for update, size in ((1, 10_000), (2, 100_000)):
            state = State(weights={{"w": np.zeros(size, dtype=np.float32)}})
            checkpoints.save(state, Progress(update=update), score=None, spec={{}}, extra={{}})
        checkpoints.wait()
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, preexec_fn=_limit_file_size, check=False)
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert "TrainingError: checkpoint step-00000002 could not be written" in last
    assert f"the last good one is {tmp_path / 'step-00000001'}" in last
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.verify(tmp_path / "step-00000001") == []


@pytest.mark.job
def test_a_full_file_system_ends_the_run_with_the_last_good_one_intact(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        checkpoints = store(tmp_path, asynchronous=True)
        save(checkpoints, 1)
        big = State(weights={"w": np.zeros(200_000, dtype=np.float32)})
        checkpoints.save(big, Progress(update=2), score=None, spec={}, extra={})
        with pytest.raises(TrainingError, match=r"No space left on device; the last good one is .*step-00000001"):
            checkpoints.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert checkpoints.newest() == tmp_path / "step-00000001"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_save_that_failed_beside_the_loop_can_be_asked_for_at_any_time(tmp_path, monkeypatch):
    checkpoints = store(tmp_path, asynchronous=True)
    checkpoints.check()
    release, full = threading.Event(), OSError(errno.ENOSPC, "No space left on device")

    def write(folder, saved):
        release.wait(60)
        raise full

    monkeypatch.setattr(format, "write", write)
    save(checkpoints, 1)
    checkpoints.check()
    release.set()
    checkpoints._background._thread.join()
    with pytest.raises(
        TrainingError, match=r"step-00000001 could not be written .*No space left on device; there is no"
    ):
        checkpoints.check()
    checkpoints.check()
    assert list(tmp_path.iterdir()) == []


def test_every_file_reaches_the_disk_before_the_checkpoint_has_its_name_and_the_name_after(tmp_path, monkeypatch):
    """A power cut at any moment then leaves the checkpoint whole, or none of that name."""
    happened = []
    flush, rename = os.fsync, Path.rename

    def flushed(descriptor):
        happened.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        flush(descriptor)

    def renamed(self, target):
        happened.append(("renamed", Path(target).name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    saved = save(store(tmp_path), 1)
    named = happened.index(("renamed", saved.name))
    before = [name for what, name in happened[:named] if what == "flushed"]
    files = {path.name for path in saved.iterdir()}
    assert len(files) == 5
    assert files <= set(before)
    assert before.index("MANIFEST.json") == 4, "the manifest vouches for the others"
    assert len(before) == 6, "and the folder itself"
    assert happened[named + 1 :] == [("flushed", tmp_path.name)]


def test_an_error_of_the_writer_is_raised_by_the_next_save_once(tmp_path):
    checkpoints = store(tmp_path, asynchronous=True)
    bad = State(weights={"w": np.array([object()], dtype=object)})
    checkpoints.save(bad, Progress(update=1), score=None, spec={}, extra={})
    with pytest.raises(Exception, match=r".+"):
        save(checkpoints, 2)
    save(checkpoints, 3)
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_second_save_waits_for_the_first_and_the_wait_is_measured(tmp_path):
    checkpoints = store(tmp_path, asynchronous=True)
    big = State(weights={"w": np.zeros(3_000_000, dtype=np.float32)})
    for update in (1, 2):
        checkpoints.save(big, Progress(update=update), score=None, spec={}, extra={})
    assert checkpoints.waited_s > 0
    checkpoints.wait()
    assert len(checkpoint.list_all(tmp_path)) == 2


def test_ranks_that_do_not_write_have_the_same_methods():
    nothing = NoCheckpoints()
    nothing.save(make_state(), Progress(), score=1.0, spec={}, extra={})
    nothing.check()
    nothing.wait()
    assert (nothing.newest(), nothing.best(), nothing.waited_s) == (None, None, 0.0)
    public = {name for name in dir(checkpoint.CheckpointStore) if not name.startswith("_")}
    assert public <= set(dir(NoCheckpoints))


def test_nothing_on_disk_is_a_pickle(tmp_path):
    path = save(store(tmp_path), 1)
    assert sorted(file.name for file in path.iterdir()) == [
        "MANIFEST.json",
        "ema.safetensors",
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_a_job_that_keeps_fewer_makes_room_before_it_writes(tmp_path, monkeypatch):
    """Its disk may be full of what the former rule kept."""
    former = store(tmp_path, keep_last=4, keep_best=0)
    for update in range(1, 5):
        save(former, update)
    there_at_writing = []
    write = format.write

    def watched(folder: Path, saved: object) -> None:
        there_at_writing.append([path.name for path in checkpoint.list_all(tmp_path)])
        write(folder, saved)

    monkeypatch.setattr(format, "write", watched)
    later = store(tmp_path, keep_last=1, keep_best=1)
    assert len(checkpoint.list_all(tmp_path)) == 4, "the one to resume from may be any of them"
    for update in (5, 6):
        save(later, update)
    assert there_at_writing == [["step-00000004"], ["step-00000005"]]


def test_room_is_made_by_checkpoints_that_rotate_and_by_what_dead_writers_left(tmp_path):
    whole = save(store(tmp_path), 1)
    damaged = save(store(tmp_path), 2)
    (damaged / "weights.safetensors").write_bytes(b"cut")
    left = tmp_path / f"{checkpoint.TEMPORARY}step-00000003@{os.uname().nodename}@{2**22 + 1}"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(bytes(1000))
    living = tmp_path / f"{checkpoint.TEMPORARY}step-00000004@another-host@1"
    living.mkdir()
    (living / "weights.safetensors").write_bytes(bytes(5000))
    assert checkpoint.reusable_bytes(tmp_path) == format.size_of(whole) + 1000


def test_a_stream_that_uses_its_memory_again_gets_the_digest_of_what_was_written(tmp_path):
    memory = bytearray(format.CHUNK_BYTES)

    def contents():
        for number in range(3):
            memory[:] = bytes([number]) * len(memory)
            yield memory

    class Late(Beside):
        def do(self, work):
            super().do(lambda: (time.sleep(0.05), work()))

    with Late() as hashing, Beside() as flushing:
        entry = format._Writer(hashing, flushing).write(tmp_path / "arrays", contents())
        flushing.wait()
    assert entry["sha256"] == hashlib.sha256((tmp_path / "arrays").read_bytes()).hexdigest()
