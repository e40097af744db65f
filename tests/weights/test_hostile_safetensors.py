"""Safetensors with descriptions that no network has are refused in one sentence, without reading what is not there."""

import json
import os
import struct
from pathlib import Path

import pytest

from mtrain.errors import CheckpointError
from mtrain.weights import reading


def written(file: Path, description: object, data: bytes = b"", *, length: int | None = None) -> Path:
    content = json.dumps(description).encode()
    file.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)
    return file


def entry(*shape: int, nbytes: int = 0) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [0, nbytes]}


@pytest.mark.parametrize(
    ("description", "nbytes", "says"),
    [
        ({"a": entry(2**60, nbytes=4)}, 4, "safetensors"),
        ({"a": entry(0, 2**62)}, 0, "damaged"),
        ({"a": entry(*[1] * 100, nbytes=4)}, 4, "damaged"),
        ({"x" * 501: entry(1, nbytes=4)}, 4, "501|name"),
        ({"a\x1bb": entry(1, nbytes=4)}, 4, "printable"),
        ({f"a{i}": entry(0) for i in range(300)}, 0, "300 arrays"),
    ],
    ids=["vast shape", "vast empty shape", "100 axes", "long name", "escape", "many arrays"],
)
def test_a_description_that_no_network_has_is_refused(description, nbytes, says, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_ENTRIES", 200)
    file = written(tmp_path / "x.safetensors", description, bytes(nbytes))
    with pytest.raises(CheckpointError, match=says) as caught:
        reading.read(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_header_of_two_gigabytes_is_refused_without_reading_the_file(tmp_path):
    file = written(tmp_path / "x.safetensors", {}, length=2 << 30)
    os.truncate(file, 1 << 40)
    with pytest.raises(CheckpointError, match=f"{2 << 30} bytes"):
        reading.read(file)


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02}q\x00.", struct.pack("<Q", 2) + b"{}"])
def test_a_sparse_file_is_too_large_and_fills_nothing(start, tmp_path):
    file = tmp_path / "x"
    file.write_bytes(start)
    os.truncate(file, 1 << 42)
    with pytest.raises(CheckpointError, match="too large"):
        reading.read(file)


def test_a_small_file_is_read(tmp_path):
    file = written(tmp_path / "x.safetensors", {"a": entry(2, nbytes=8)}, struct.pack("<2f", 1, 2))
    assert reading.read(file).arrays["a"].tolist() == [1, 2]
