"""Which processes are taken for ranks of an earlier attempt, by what the lock file of ranks says."""

import fcntl
import os
import signal

import pytest

from mtrain.errors import UsageError
from mtrain.system import attempts
from mtrain.system.failures import read_failures, write_failure
from mtrain.system.runfolder import RunFolder


@pytest.mark.parametrize("ticks", [-1, 1, 0])
def test_a_process_that_has_the_id_of_a_former_rank_is_neither_killed_nor_named(tmp_path, monkeypatch, ticks):
    """The id belongs to somebody else by then, who started at another time."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(attempts.os, "kill", lambda pid, number: sent.append((pid, number)))
    mine, other = os.getpid(), os.getppid()
    lines = [
        f"{mine} {attempts._ticks(mine) + ticks}" if ticks else f"{mine}",
        f"{other} 0",
        f"{other} 1 1",
        "-1 7",
        "not a rank",
    ]
    file = tmp_path / ".ranks-1"
    file.write_text("\n".join(lines))
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(UsageError, match=r"processes unknown\); wait until they have saved, or end them$"):
            attempts.await_former_ranks(tmp_path, 1, timeout_s=0.1)
        assert sent == []
        file.write_text(f"{file.read_text()}\n{mine} {attempts._ticks(mine)}\n")
        with pytest.raises(UsageError, match=f"kill -9 {mine}$"):
            attempts.await_former_ranks(tmp_path, 1, timeout_s=0.1)
    assert set(sent) == {(mine, signal.SIGKILL)}, "one that is the rank itself is ended"


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_in_place_of_the_lock_of_ranks_is_passed_over(tmp_path, kind):
    file, outside = tmp_path / ".ranks-0", tmp_path / "outside"
    outside.write_text("kept")
    {"pipe": os.mkfifo, "link": lambda path: os.symlink(outside, path), "folder": os.mkdir}[kind](file)
    attempts.await_former_ranks(tmp_path, None, timeout_s=0.1)
    assert outside.read_text() == "kept"


@pytest.mark.parametrize("node", [1, None])
def test_a_rank_of_several_hosts_alone_dies_with_its_agent(tmp_path, monkeypatch, node):
    died_with = []
    monkeypatch.setattr(attempts, "_die_with", died_with.append)
    mark = attempts.draw_mark(node)
    monkeypatch.setattr(attempts.fcntl, "flock", lambda *_: None)  # no later test is to find a lock
    attempts.join(mark, tmp_path)
    assert died_with == ([] if node is None else [mark])


def test_a_failure_of_another_attempt_is_none_of_this_one(tmp_path):
    run = RunFolder(tmp_path)
    write_failure(run, 1, RuntimeError("closed by peer"), attempt="earlier")
    assert read_failures(run, attempt="this one") == []
    for attempt in ("earlier", None):
        assert [failure["message"] for failure in read_failures(run, attempt=attempt)] == ["closed by peer"]
