"""Logs are shortened while programs write to them, without a loss of what they write meanwhile."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mtrain.system import log_limit
from mtrain.system.log_limit import MOST_LEFT_BYTES, PIECE_BYTES, Cut, LimitedLogs, Output, end_of, shorten
from mtrain_ui.pages.folder import RunFiles

MIB = 1 << 20
IN_MEMORY = Path("/dev/shm")
ENDLESS = """
import os, sys
number = 0
while os.getppid() == int(sys.argv[1]):
    os.write(1, b"".join(b"%015d\\n" % each for each in range(number, number + 1000)))
    number += 1000
"""


@pytest.fixture
def in_memory():
    """A folder whose file system gives blocks back and makes no file shorter."""
    if not IN_MEMORY.is_dir():
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name)


def filled(path: Path, size: int) -> Path:
    path.write_bytes(b"".join(b"%015d\n" % number for number in range(size // 16)))
    return path


def lines(content: bytes) -> list[int]:
    return [int(line) for line in content.splitlines() if len(line) == 15 and line.isdigit()]


def ends_of(log: Path) -> tuple[bytes, bytes]:
    """Return what is before the cut of a log of which a quarter of 1 MiB comes before it, and what comes after a hole there."""
    with log.open("rb", buffering=0) as file:
        begun = file.read(MIB // 4)
        file.seek(os.lseek(file.fileno(), MIB // 4, os.SEEK_DATA))
        return begun, file.read()


@pytest.mark.job
@pytest.mark.parametrize("folder", ["tmp_path", "in_memory"])
def test_a_writer_that_never_rests_loses_no_line_outside_of_what_was_left_out(folder, request):
    """The writer and the process that shortens take turns as they happen to; each line has its number."""
    log = request.getfixturevalue(folder) / "rank-0.log"
    with log.open("ab") as output:
        writer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(os.getpid())], stdout=output)
    try:
        cuts = 0
        while cuts < 20:
            if shorten(log, limit_bytes=MIB, appends=True):
                cuts += 1
                begun, kept = ends_of(log)
                found = lines(kept)
                assert found == list(range(found[0], found[-1] + 1)), "what comes after the cut is whole"
                assert len(kept) >= MIB // 4
                left_out = int(begun[-log_limit.MARK_BYTES :].split()[1])
                first = (len(kept.partition(b"\n")[0]) + 1) % 16  # of the line that the cut has left in part
                assert found[0] * 16 == MIB // 4 + left_out + first, "the mark says how many bytes are missing"
    finally:
        writer.kill()
        writer.wait()
    begun, _ = ends_of(log)
    assert begun[: -log_limit.MARK_BYTES] == filled(log, MIB).read_bytes()[: MIB // 4 - log_limit.MARK_BYTES]


def test_a_log_that_is_short_enough_is_left_alone(tmp_path):
    log = filled(tmp_path / "rank-0.log", MIB)
    before = log.read_bytes()
    assert shorten(log, limit_bytes=MIB, appends=True) is None
    assert log.read_bytes() == before


def test_a_file_with_a_hole_counts_what_it_holds(in_memory):
    log = filled(in_memory / "rank-0.log", 8 * MIB)
    assert shorten(log, limit_bytes=MIB, appends=True) == Cut(MIB // 4, 8 * MIB - MIB // 4, is_shorter=False)
    assert (log.stat().st_size, log.stat().st_blocks * 512) == (8 * MIB, MIB // 2)
    assert shorten(log, limit_bytes=MIB, appends=True) is None, "it holds half of what it may"


def test_a_file_that_others_have_opened_as_they_like_keeps_its_length(tmp_path):
    """A writer without O_APPEND goes on at its own place, wherever the end is."""
    folder = tmp_path / "launcher"
    folder.mkdir()
    with (folder / "gpu.log").open("wb") as output:
        output.write(4 * MIB * b"x")
        output.flush()
        LimitedLogs([], limit_bytes=MIB, foreign=folder).look()
        output.write(b"the end")
    assert (folder / "gpu.log").stat().st_size == 4 * MIB + 7
    assert (folder / "gpu.log").stat().st_blocks * 512 <= MIB
    assert (folder / "gpu.log").read_bytes().endswith(b"xxxthe end")


def test_what_is_shown_of_a_file_with_a_hole_has_no_zeros(in_memory):
    (in_memory / "logs").mkdir()
    log = filled(in_memory / "logs" / "rank-0.log", 4 * MIB)
    shorten(log, limit_bytes=MIB, appends=True)
    assert "\0" not in end_of(log, start=0, limit_bytes=3 * MIB)
    shown, _ = RunFiles(in_memory).tail("logs/rank-0.log", limit=3 * MIB)
    assert "\0" not in shown
    assert shown.endswith(f"{4 * MIB // 16 - 1:015d}\n")


def test_a_file_system_that_can_do_neither_is_named_once_in_the_file_that_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(log_limit, "_change", lambda *arguments: False)
    log = filled(tmp_path / "rank-0.log", 2 * MIB)
    logs = LimitedLogs([log, tmp_path / "rank-1.log"], limit_bytes=MIB)
    assert logs.look(now=True) == {}
    assert logs.look(now=True) == {}
    assert log.stat().st_size > 2 * MIB
    assert log.read_bytes().count(b"put the logs elsewhere with cluster.log_dir") == 1
    assert not (tmp_path / "rank-1.log").exists()


def test_two_jobs_that_share_a_log_do_not_shorten_it_at_once(tmp_path):
    log = filled(tmp_path / "rank-0.log", 2 * MIB)
    with log_limit._hold(log) as other:
        assert other is not None
        assert shorten(log, limit_bytes=MIB, appends=True) is None
    assert shorten(log, limit_bytes=MIB, appends=True) is not None


def test_a_log_that_is_a_link_is_not_shortened(tmp_path):
    elsewhere = filled(tmp_path / "precious", 2 * MIB)
    (tmp_path / "rank-0.log").symlink_to(elsewhere)
    assert LimitedLogs([tmp_path / "rank-0.log"], limit_bytes=MIB).look() == {}
    assert elsewhere.stat().st_size == 2 * MIB


def test_logs_are_looked_at_once_a_second_and_at_the_end(tmp_path):
    now = 0.0
    log = tmp_path / "rank-0.log"
    logs = LimitedLogs([log], limit_bytes=MIB, clock=lambda: now)
    assert logs.look() == {}
    filled(log, 2 * MIB)
    now = 0.9
    assert logs.look() == {}
    now = 1.0
    (cut,) = logs.look().values()
    assert (cut.start, cut.stop) == (MIB // 4, 7 * MIB // 4)
    filled(log, 2 * MIB)
    assert logs.look(now=True) != {}


def test_without_a_limit_logs_are_kept_whole(tmp_path):
    log = filled(tmp_path / "rank-0.log", 2 * MIB)
    assert LimitedLogs([log], limit_bytes=None).look(now=True) == {}
    assert log.stat().st_size == 2 * MIB


@pytest.mark.parametrize(("offset", "after"), [(5, 5), (10, 10), (15, 10), (20, 10), (25, 15)])
def test_a_place_in_a_log_moves_with_what_was_taken_out_before_it(offset, after):
    assert Cut(10, 20, is_shorter=True).offset_after(offset) == after
    assert Cut(10, 20, is_shorter=False).offset_after(offset) == offset


def test_the_output_of_a_rank_is_what_its_log_gains_and_its_last_line_gets_an_end(tmp_path):
    log = tmp_path / "rank-0.log"
    assert Output(log).read() == [], "not there yet"
    log.write_bytes(b"of an earlier attempt\n")
    output = Output(log)
    assert output.read(at_end=True) == []
    with log.open("ab") as file:
        file.write(b"\r 10%\r 20%\xff")
    assert output.read() == [b"\r 10%\r 20%\xff"]
    assert output.read(at_end=True) == [b"\n"]


def test_long_output_comes_in_pieces_and_of_very_much_that_is_left_the_newest_part(tmp_path):
    log = filled(tmp_path / "rank-0.log", 0)
    output = Output(log)
    content = filled(tmp_path / "all", MOST_LEFT_BYTES + 2 * PIECE_BYTES).read_bytes()
    log.write_bytes(content)
    assert output.read() == [content[:PIECE_BYTES]]
    first, *rest = output.read(at_end=True)
    assert str(PIECE_BYTES) in first.decode()
    assert "rank-0.log" in first.decode()
    assert b"".join(rest) == content[2 * PIECE_BYTES :]


@pytest.mark.parametrize("place", ["tmp_path", "in_memory"])
def test_output_goes_on_where_a_range_of_its_log_was_taken_out(place, request):
    log = request.getfixturevalue(place) / "rank-0.log"
    log.touch()
    output = Output(log)
    filled(log, 4 * MIB)
    while output.read():
        pass
    with log.open("ab") as file:
        file.write(b"before\n")
    try:
        cut = shorten(log, limit_bytes=2 * MIB, appends=True)
    except OSError:
        pytest.skip("this file system cannot take a range out of a file")
    output.skip("rank-1.log", Cut(0, 4 * MIB, is_shorter=True))
    output.skip(log.name, cut)
    with log.open("ab") as file:
        file.write(b"after\n")
    assert output.read(at_end=True) == [b"before\nafter\n"]
    if not cut.is_shorter:
        output._offset = cut.start + 1  # as of a reader that the hole has overtaken
        assert output.read()[0][:16] == b"%015d\n" % (cut.stop // 16)
