"""The copying process on a busy host: every copy that has begun is made, and what was handed over is not lost."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="the extra backup is not installed")

from mtrain.core.checkpoint import store
from mtrain.spec.model import CheckpointSpec
from mtrain.weights.backup import copier as copiers
from mtrain.weights.backup.copier import Copier, Kept, News
from mtrain.weights.backup.place import StorageFolder
from mtrain.weights.backup.run_copies import RunCopies
from mtrain.weights.backup.worker import LOOKS, StallWatch
from tests.backup import paced
from tests.backup.test_copies import Run, contents, settle

pytestmark = pytest.mark.smoke

WAIT_S = 120.0


class Copied:
    """A run whose checkpoints are copied to a place that a test can hold up."""

    def __init__(self, run: Run, control: Path, timeout_s: float) -> None:
        self.run, self._control = run, control
        self.copies = Copier(CheckpointSpec(copy_to=f"paced://{run.bucket}", copy_timeout_s=timeout_s), run.folder)

    def save(self, update: int) -> dict[str, bytes]:
        """Write a checkpoint and hand it over; return its content."""
        path = self.run.save(update)
        self.copies.add(path)
        return contents(path)

    def rotate(self, update: int) -> None:
        """Delete a checkpoint, as ``checkpoint.keep_last`` does."""
        shutil.rmtree(store.folder_of(self.run.checkpoints.folder, update))

    def close_place(self) -> None:
        (self._control / "closed").write_text("")

    def open_place(self) -> None:
        (self._control / "closed").unlink()

    def until_begun(self, update: int) -> None:
        name = store.folder_of(Path(), update).name
        until(lambda: (self._control / "begun").exists() and (self._control / "begun").read_text() == name)

    def names(self) -> list[str]:
        """Wait until nothing is left to be copied; return what was copied, in this order."""
        news = settle(self.copies)
        assert [each.kind for each in news] == ["copy"] * len(news), news
        return [each.fields["name"] for each in news]

    def there(self, update: int) -> dict[str, bytes]:
        """Return the copy of a checkpoint, without what goes along."""
        folder = store.folder_of(self.run.bucket / "digits", update)
        return {name: content for name, content in contents(folder).items() if not name.startswith(("run/", "COPY"))}


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copied]]:
    made: list[Copied] = []
    monkeypatch.setattr(copiers, "EXTRA_S", WAIT_S)  # a busy host takes its time to start a process

    def make(*, timeout_s: float = WAIT_S, pause_s: float = 0.0) -> Copied:
        for name, value in paced.install(tmp_path / "plugin", tmp_path / "control", pause_s=pause_s).items():
            monkeypatch.setenv(name, value)
        made.append(Copied(Run(tmp_path), tmp_path / "control", timeout_s))
        return made[0]

    yield make
    for each in made:
        each.copies.close()
        assert list(each.run.checkpoints.folder.glob(".tmp-*")) == []


@pytest.mark.job
def test_what_was_handed_over_is_copied_though_it_was_deleted_before_the_process_came_to_it(copied):
    job = copied()
    job.save(10)
    assert job.names() == ["step-00000010"]
    os.kill(job.copies._process.pid, signal.SIGSTOP)  # as on a host without a free core
    first = job.save(20)
    job.rotate(20)
    second = job.save(30)
    job.rotate(30)
    os.kill(job.copies._process.pid, signal.SIGCONT)
    assert job.names() == ["step-00000020", "step-00000030"]
    assert (job.there(20), job.there(30)) == (first, second)


@pytest.mark.job
def test_a_copy_under_way_is_made_before_a_newer_checkpoint_and_the_newest_comes_next(copied):
    job = copied()
    job.close_place()
    written = {10: job.save(10)}
    job.until_begun(10)
    written |= {update: job.save(update) for update in (20, 30, 40)}
    for update in (10, 20, 30, 40):
        job.rotate(update)
    assert job.copies.news() == []
    job.open_place()
    assert job.names() == ["step-00000010", "step-00000040"]
    assert {update: job.there(update) for update in (10, 40)} == {update: written[update] for update in (10, 40)}


@pytest.mark.job
def test_a_copy_that_moves_may_take_longer_than_the_limit(copied):
    job = copied(timeout_s=1.0, pause_s=0.15)
    job.save(10)
    (news,) = settle(job.copies)
    assert news.kind == "copy", news
    assert news.fields["seconds"] > 2.0  # four objects of twelve parts


@pytest.mark.job
def test_a_copy_of_which_nothing_arrives_is_given_up_and_the_next_one_is_made(copied):
    job = copied(timeout_s=0.5)
    job.close_place()
    job.save(10)
    job.until_begun(10)
    job.save(20)
    news: list[News] = []
    until(lambda: news.extend(job.copies.news()) or news)
    assert [each.kind for each in news] == ["warning"]
    assert "step-00000010" in news[0].fields["message"]
    assert "0.5 s (checkpoint.copy_timeout_s)" in news[0].fields["message"]
    job.open_place()
    assert job.names() == ["step-00000020"]


@pytest.mark.job
def test_a_process_that_is_killed_loses_no_checkpoint_that_has_rotated(copied):
    job = copied()
    job.close_place()
    written = job.save(10)
    job.until_begun(10)
    job.rotate(10)
    os.kill(job.copies._process.pid, signal.SIGKILL)
    job.open_place()
    assert job.names() == ["step-00000010"]
    assert job.there(10) == written


@pytest.mark.job
def test_many_checkpoints_in_a_row_that_are_passed_over_are_told_once_with_the_remedy(copied):
    job = copied()
    job.close_place()
    job.save(10)
    job.until_begun(10)
    for update in range(20, 20 + 10 * copiers.MANY_PASSED_OVER, 10):
        job.save(update)
    assert job.copies.news() == []  # one less: the newest waits
    job.save(1000)
    (news,) = job.copies.news()
    assert news.kind == "warning"
    assert f"{copiers.MANY_PASSED_OVER} checkpoints in a row" in news.fields["message"]
    assert "checkpoint.every_updates" in news.fields["message"]
    for update in range(1010, 1010 + 20 * copiers.MANY_PASSED_OVER, 10):
        job.save(update)
    assert job.copies.news() == []
    job.open_place()
    assert job.names() == ["step-00000010", f"step-{1000 + 200:08d}"]
    assert job.copies.summary()["copies"]["failed"] == 0


@pytest.mark.job
def test_where_no_links_can_be_made_the_checkpoint_itself_is_copied_and_stays(copied, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    job = copied()
    written = job.save(10)
    assert job.names() == ["step-00000010"]
    assert job.there(10) == written == contents(store.folder_of(job.run.checkpoints.folder, 10))


def test_links_of_a_killed_job_are_deleted_at_the_next_start_and_counted_once_as_room(tmp_path):
    run = Run(tmp_path)
    path = run.save(10)
    kept = Kept.of(path)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert contents(kept.path) == contents(path)
    counted = store.reusable_bytes(run.checkpoints.folder)
    assert size - counted < 10_000  # without the manifest
    assert counted <= size
    shutil.rmtree(path)
    assert store.reusable_bytes(run.checkpoints.folder) == size
    store._clean(run.checkpoints.folder)
    assert not kept.path.exists()


def test_work_has_stalled_when_nothing_moved_for_all_looks_and_not_before():
    watch = StallWatch(1.0, lambda: None)
    for _ in range(5):
        assert not any(watch.look() for _ in range(LOOKS))
        watch.note_progress()
    assert [watch.look() for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


def test_large_files_tell_that_they_move_on_a_disk_of_this_host(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5 << 20))
    moved: list[int] = []
    place = StorageFolder(f"file://{tmp_path}/there", moved=lambda: moved.append(1))
    place.upload("x/a", tmp_path / "a")
    assert len(moved) >= 5
    assert place.size("x/a") == 5 << 20
    before = len(moved)
    place.digest("x/a", size=5 << 20)
    assert len(moved) > before
    assert RunCopies(place).names() == ([], [])


def test_the_newest_checkpoint_waits_with_its_files_and_those_passed_over_are_counted(tmp_path, monkeypatch):
    run, handed, answers = Run(tmp_path), [], []
    monkeypatch.setattr(copiers, "MANY_PASSED_OVER", 2)
    monkeypatch.setattr(Copier, "_hand_over", lambda copies: handed.append(copies._under_way))
    monkeypatch.setattr(Copier, "_answers", lambda copies: [answers.pop()] if answers else [])
    monkeypatch.setattr(Copier, "_is_lost", lambda copies: False)
    copies, written, warned = Copier(CheckpointSpec(copy_to=run.address), run.folder), {}, []
    try:
        for update in (10, 20, 30, 40):
            path = run.save(update)
            copies.add(path)
            written[path.name] = contents(path)
            shutil.rmtree(path)
            warned.append([news.fields["message"] for news in copies.news()])
        answers.append({"name": "step-00000010"})
        assert [contents(kept.path) for kept in handed] == [written["step-00000010"]]
        assert [news.kind for news in copies.news()] == ["copy"]
        assert handed[-1].name == "step-00000040"
        assert contents(handed[-1].path) == written["step-00000040"]
    finally:
        copies.close()
    assert warned[:3] == [[], [], []]
    assert "2 checkpoints in a row were not copied" in warned[3][0]
    assert list(run.checkpoints.folder.glob(".tmp-*")) == []
