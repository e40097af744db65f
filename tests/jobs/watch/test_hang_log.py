"""The file of hangs in a run folder: what was said is read back, whatever else is in the file."""

import pytest

from mtrain.jobs.watch.hang_log import FILE, HangLog, words

SAID = {"hang": "still", "text": "nothing moves", "ranks": [1]}


def test_hangs_are_read_back_with_their_ends(tmp_path):
    log = HangLog(tmp_path)
    for report in (SAID, {"over": True}, {**SAID, "text": "rank 1 has been stopped"}):
        log.add(report)
    first, second = log.read()
    assert (first["text"], "over" in first, second["text"], "over" in second) == (
        "nothing moves",
        True,
        "rank 1 has been stopped",
        False,
    )
    lines = words(log.read())
    assert ["(went on" in line for line in lines] == [True, False]
    assert all(line.startswith("hang 20") for line in lines)


def test_the_last_three_are_shown(tmp_path):
    log = HangLog(tmp_path)
    for number in range(5):
        log.add({**SAID, "text": str(number)})
    assert [hang["text"] for hang in log.read()] == ["2", "3", "4"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"time": 1.0, "text": "to',
        b"\xff\xfe\n[1]\n7\nnull\n",
        b'{"time": "now", "text": "x"}\n{"text": "x"}\n{"time": true, "text": "x"}\n{"time": 1.0, "text": 7}\n',
        b'{"time": 1.0, "over": true}\n',
        b"{" * 100_000,
    ],
)
def test_what_is_torn_or_foreign_is_left_out(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    assert HangLog(tmp_path).read() == []


def test_a_time_that_is_none_is_shown_as_unknown(tmp_path):
    (tmp_path / FILE).write_text('{"time": 1e300, "text": "x"}\n')
    assert words(HangLog(tmp_path).read()) == ["hang ?: x"]


def test_a_folder_that_is_gone_ends_no_job(tmp_path):
    HangLog(tmp_path / "gone").add(SAID)
    assert HangLog(tmp_path / "gone").read() == []
