"""Write the arrays of a checkpoint together: each rank writes what it holds, where all ranks see the folder of rank 0.

The files have the bytes that rank 0 alone would write. It makes them in their full size, every rank writes into them, and
each file is then read by one rank, which flushes it and takes its digest.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint import arrays_file
from mtrain.core.checkpoint.background import Beside
from mtrain.core.interfaces import Part, SplitStream
from mtrain.spec import outputs
from mtrain.spec.files import open_file, read_text

BEAT_S = 10.0
"""Ranks that work for longer tell each other so this often: waiting for one another has a time limit, writing has none."""


def agree(stream: SplitStream, folder: Path | None) -> Path | None:
    """Return the folder that all ranks write into; None if some rank does not see it. Every rank must call.

    ``folder``: on rank 0 the folder that it is going to make; None on other ranks.
    """
    named, mark = stream.exchange(None if folder is None else [str(folder), _mark(folder.parent)])[0]
    sees = stream.exchange(bool(mark) and _mark(Path(named).parent) == mark)
    return Path(named) if all(sees) else None


def _mark(folder: Path) -> str:
    """Return a text that is equal for processes of one machine and user that see the same folder; "": it is not known."""
    try:
        boot = read_text(Path("/proc/sys/kernel/random/boot_id"), limit=100).strip()
        status = folder.stat()
    except (OSError, ValueError):
        return ""
    return f"{boot} {os.geteuid()} {status.st_dev} {status.st_ino}"


def give_up(stream: SplitStream) -> None:
    """Tell the ranks that have agreed, and wait for the files, that there will be none."""
    _everywhere(stream, _fail)


def write(stream: SplitStream, files: Mapping[Part, Path], *, creates: bool) -> dict[str, Any]:
    """Write the files of all parts, and return their entries for the manifest. Every rank that has agreed must call.

    ``creates``: whether this is rank 0, whose folder exists by now.

    Raises:
        OSError: A rank cannot write.
    """
    _everywhere(stream, partial(_create, stream, files) if creates else dict)
    written = _everywhere(stream, partial(_write_own, stream, files))
    values = {path: _values_bytes(stream, part) for part, path in files.items()}
    assert sum(written) == sum(values.values()), f"ranks wrote {written} bytes of {sum(values.values())}"
    # Computed, not looked up: a rank that failed here alone would leave the others waiting.
    sizes = {path: len(arrays_file.header(stream.outlines[part])) + values[path] for part, path in files.items()}
    number = len(written)
    shares: list[list[Path]] = [[] for _ in range(number)]
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        min(shares, key=lambda share: sum(sizes[path] for path in share)).append(path)
    digests = _everywhere(stream, lambda: {path.name: _finish(path) for path in shares[stream.rank]})
    found = {name: digest for of_rank in digests for name, digest in of_rank.items()}
    return {path.name: {"size_bytes": sizes[path], "sha256": found[path.name]} for path in files.values()}


def _everywhere(stream: SplitStream, work: Callable[[], Any]) -> list[Any]:
    """Return what ``work`` returns on all ranks, each of which must call.

    Raises:
        Exception: What it raised here; OSError for what it raised on another rank.
    """
    results: list[Any] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="checkpoint-part")
    thread.start()
    told: list[Any] = [None]
    while not all(told):
        thread.join(BEAT_S)
        failed = [(getattr(error, "errno", None), getattr(error, "strerror", None) or repr(error)) for error in errors]
        told = stream.exchange((failed, results) if failed or results else None)
    for error in errors:
        raise error
    for failed, _ in told:
        for number, text in failed:
            raise OSError(number, text)
    return [of_rank[0] for _, of_rank in told]


def _fail() -> None:
    raise OSError(0, "rank 0 has no room for its files")


def _create(stream: SplitStream, files: Mapping[Part, Path]) -> None:
    for part, path in files.items():
        header = arrays_file.header(stream.outlines[part])
        with outputs.open_to_write(path, "xb") as file:
            file.write(header)
            file.truncate(len(header) + _values_bytes(stream, part))


def _values_bytes(stream: SplitStream, part: Part) -> int:
    return sum(map(arrays_file.size_bytes, stream.outlines[part].values()))


def _write_own(stream: SplitStream, files: Mapping[Part, Path]) -> int:
    """Write what this rank holds, and return the number of bytes."""
    total = 0
    for part, path in files.items():
        outlines = stream.outlines[part]
        begin, starts = len(arrays_file.header(outlines)), arrays_file.starts(outlines)
        with outputs.open_to_write(path, "r+b", buffering=0) as file:
            for name, first, values in stream.held(part, list(starts)):
                assert values.dtype == outlines[name].dtype, f"{name}: {values.dtype}, {outlines[name]}"
                little = np.asarray(values, dtype=values.dtype.newbyteorder("<"))
                _write_at(file.fileno(), little.view(np.uint8).data, begin + starts[name] + first * values.itemsize)
                total += values.nbytes
    return total


def _write_at(file: int, view: memoryview, place: int) -> None:
    while len(view):
        done = os.pwrite(file, view, place)
        view, place = view[done:], place + done


def _finish(path: Path) -> str:
    """Flush a file whose content is complete, and return its digest."""
    with open_file(path) as file, Beside() as flushing:
        flushing.do(partial(os.fsync, file.fileno()))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushing.wait()
    return digest
