"""Reading files that others have written: whole, up to a limit, and only regular ones."""

import os
from pathlib import Path

import pytest

from mtrain.spec.files import parse_json, read_bytes, read_text


def test_a_file_is_as_large_as_the_limit_at_most(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_bytes(file, limit=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than the 4"):
        read_bytes(file, limit=4)


def test_a_file_without_a_size_is_read_whole_up_to_the_limit() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    content = read_bytes(status, limit=1 << 20)
    assert content.startswith(b"Name:")
    assert b"\nThreads:" in content
    with pytest.raises(OSError, match="more than the 100"):
        read_bytes(status, limit=100)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "named pipe"), (tmp_path, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(OSError, match=kind):
            read_bytes(path, limit=10)


def test_text_has_no_byte_order_mark_and_is_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffmaße".encode())
    assert read_text(file, limit=100) == "maße"
    file.write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="byte 2"):
        read_text(file, limit=100)


def test_json_that_is_nested_too_deeply_is_a_value_error() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 200_000)
