"""Errors of the threads that take digests and flush files reach the caller, and no file stays open."""

import errno
import os
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from mtrain.core.checkpoint import format
from mtrain.core.checkpoint.background import Beside
from mtrain.core.interfaces import Progress, State
from mtrain.spec import outputs

SAVED = format.Saved(
    state=State(weights={"a": np.ones(5)}, ema={"a": np.ones(3)}, moments={"m/a": np.ones(3)}, counters={}),
    progress=Progress(),
    spec={},
)


def test_a_file_that_cannot_be_flushed_is_told_and_all_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[IO[bytes]] = []
    to_write = outputs.open_to_write

    def recorded(*words: Any, **options: Any) -> Any:
        opened.append(to_write(*words, **options))
        return opened[-1]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outputs, "open_to_write", recorded)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        format.write(tmp_path / "checkpoint", SAVED)
    assert not (tmp_path / "checkpoint" / format.MANIFEST).exists()
    assert [file.closed for file in opened] == [True] * len(format.ARRAYS)


def test_the_first_error_of_work_beside_is_raised_and_later_work_is_done() -> None:
    done: list[int] = []

    def fail(number: int) -> None:
        raise ValueError(f"number {number}")

    with Beside() as beside:
        for work in (lambda: fail(1), lambda: done.append(2), lambda: fail(3)):
            beside.do(work)
        with pytest.raises(ValueError, match="number 1"):
            beside.wait()
    assert done == [2]
