"""Text of others on a terminal: what is cut, what stays, and on which stream it appears."""

import io
import json
import sys

import pytest

from mtrain.spec.terminal import one_line, printable, say


def test_text_is_cut_before_it_is_made_longer() -> None:
    assert printable("ab\x1bcd", limit=3) == "ab\\u001b"
    assert printable("a\tb\r\nc") == "a\tb\nc"
    assert one_line("a\tb\r\nc") == "a\\u0009b\\u000ac"
    assert json.loads(f'"{one_line(chr(7) + chr(10))}"') == "\x07\n"


def test_text_appears_on_the_stream_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("a\u202eb")
    say("c", err=True, nl=False)
    other = io.StringIO()
    say("d", stream=other)
    assert tuple(capsys.readouterr()) == ("a\\u202eb\n", "c")
    assert other.getvalue() == "d\n"
    assert sys.stdout is not other
