"""What the ranks of a script print is shown as it is, and nobody who reads it holds up or ends the job."""

import io
import os
import threading
import time
from pathlib import Path

import pytest

from mtrain.records import console
from mtrain.records.console import Notes, Output, Plain, Quiet, make_display
from mtrain.records.rich import Rich


class Gone(io.StringIO):
    """A stream that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def pipe() -> tuple[int, io.TextIOWrapper]:
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w")


def test_bytes_of_rank_0_pass_unchanged_and_sentences_are_lines_elsewhere() -> None:
    reader, stream = pipe()
    notes = io.StringIO()
    display = Output(stream, notes=notes, title="run: a.py on ddp", clock=iter((0.0, 75.0)).__next__)
    printed = b"\xff\x00\r 10%\r 20% \x1b[1mbold"
    display.output(printed, rank=None)
    display.note("SIGINT\x1b[2J")
    display.show_end(130, logs=Path("runs/a/logs"))
    display.close()
    stream.close()
    assert os.read(reader, 100) == printed
    said = notes.getvalue().splitlines()
    assert said[:3] == ["run: a.py on ddp", "", "SIGINT\\u001b[2J"], "a sentence begins a line of its own"
    assert said[3] == "ended after 1 min 15 s with exit code 130; logs: runs/a/logs"


def test_lines_of_all_ranks_have_numbers_and_are_never_mixed() -> None:
    stream = io.StringIO()
    display = Output(stream, notes=io.StringIO(), title="")
    for rank, data in ((0, b"a"), (1, b"b 1%\rb 2%\r\n"), (0, b"aa\n\nc"), (0, b"\n")):
        display.output(data, rank=rank)
    display.close()
    assert stream.getvalue().splitlines() == ["[1] b 2%", "[0] aaa", "[0] ", "[0] c"]


def test_a_reader_that_stands_still_holds_nothing_up_and_is_told_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "MOST_WAITING_BYTES", 1 << 20)
    reader, stream = pipe()
    notes = io.StringIO()
    display = Output(stream, notes=notes, title="title")
    while not notes.getvalue():
        time.sleep(0.01)
    piece = b"x" * (1 << 18)
    for _ in range(16):  # four times what waits at most; nobody reads yet
        display.output(piece, rank=None)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(reader, 1 << 20), b"")))
    reading.start()
    display.output(b"last\n", rank=None)
    display.close()
    stream.close()
    reading.join()
    text = b"".join(got)
    left_out = 16 * len(piece) - text.count(b"x")
    assert left_out > 0
    assert b"[mtrain: %d bytes are not shown here, see the logs]" % left_out in text
    assert text.endswith(b"last\n")


def test_a_reader_that_has_gone_ends_nothing() -> None:
    notes = io.StringIO()
    display = Output(Gone(), notes=notes, title="title")
    for _ in range(3):
        display.output(b"line\n", rank=None)
    display.show_end(0, logs=Path("logs"))
    display.close()
    assert "with exit code 0" in notes.getvalue()


@pytest.mark.parametrize("kind", [Plain, Quiet, Notes, Rich])
def test_no_display_whose_terminal_has_gone_ends_the_job(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    """`mtrain train | tee log` and Ctrl-C: tee ends first, and the ranks must still be asked to save."""
    display = kind(Gone(), **({} if kind in (Quiet, Notes) else {"title": "title"}))
    display.note("saving and ending ...")
    display.record({"kind": "update", "update": 1})
    display.output(b"line\n", rank=None)
    display.tick()
    display.show_end(0, logs=Path("logs"))
    display.close()
    assert capsys.readouterr().err.count("the progress display has failed") == 1


def test_a_session_script_has_what_rank_0_prints_between_its_records_and_quiet_shows_none() -> None:
    for mode, wanted in (("plain", True), ("rich", True), ("quiet", False)):
        stream = io.StringIO()
        display = make_display(mode, title="t", stream=stream)
        display.output(b"my own line\nhal", rank=None)
        display.output(b"f\n", rank=None)
        display.close()
        assert ("my own line" in stream.getvalue()) == wanted, mode
        assert ("half" in stream.getvalue()) == wanted, mode
