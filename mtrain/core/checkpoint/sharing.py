"""Load a checkpoint on all ranks, and send it to those ranks whose host does not have it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint.arrays_file import MappedArrays
from mtrain.core.checkpoint.format import ARRAYS as FILES
from mtrain.core.checkpoint.format import MANIFEST, Saved, as_json, from_json, load, manifest_of
from mtrain.core.collective import broadcast
from mtrain.core.interfaces import Array, Collective, Progress, State
from mtrain.errors import CheckpointError
from mtrain.spec.files import MAX_OWN_BYTES, read_bytes

PART_BYTES = 16 * 1024 * 1024
"""Largest number of bytes sent at once. Every rank allocates as much for each of the other ranks."""
ARRAYS = ("weights", "ema", "moments")


def load_everywhere(folder: Path, collective: Collective) -> Saved:
    """Load the checkpoint ``folder`` on every rank. Every rank must call.

    A rank may lack the folder, or have another checkpoint under that name, left by an earlier job, if hosts do not
    share folders. Such a rank receives the checkpoint of rank 0: plain values as JSON, arrays as bytes.

    Raises:
        CheckpointError: rank 0 cannot read the checkpoint; raised on all ranks.
    """
    marks = collective.all_gather(_mark(folder))
    if marks[0] is None:
        raise CheckpointError(f"{folder}: cannot be read on the host of rank 0; name one that is there")
    own = load(folder) if marks[collective.rank] == marks[0] else None
    if all(mark == marks[0] for mark in marks):
        assert own is not None
        _name_contents(own, folder)
        return own
    return _send(own, collective)


def _name_contents(own: Saved, folder: Path) -> None:
    """Tell the arrays the digests of their files, which are those of all ranks: nobody has to compare the values."""
    entries = manifest_of(folder)["files"]
    for part, name in FILES.items():
        arrays = getattr(own.state, part)
        if isinstance(arrays, MappedArrays):
            arrays.sha256 = entries[name]["sha256"]


def _mark(folder: Path) -> str | None:
    """Return a mark that is equal for equal checkpoints, because the manifest holds the digests of all files.

    It is None if there is no manifest.
    """
    try:
        return hashlib.sha256(read_bytes(folder / MANIFEST, limit=MAX_OWN_BYTES)).hexdigest()
    except OSError:
        return None


def _send(own: Saved | None, collective: Collective) -> Saved:
    """Send the checkpoint of rank 0 to all ranks. Every rank must call; one that has its ``own`` keeps that."""
    source = own if collective.rank == 0 else None
    head = from_json(json.loads(broadcast(collective, "" if source is None else json.dumps(as_json(_head(source))))))
    received: dict[str, dict[str, Array]] = {part: {} for part in ARRAYS}
    for part, name, kind, shape in head["arrays"]:
        array = np.empty(shape, dtype=kind)
        flat = array.reshape(-1).view(np.uint8)
        sent_bytes = (
            None
            if source is None
            else np.ascontiguousarray(getattr(source.state, part)[name]).reshape(-1).view(np.uint8)
        )
        for start, end in _parts(flat.size):
            content = broadcast(collective, b"" if sent_bytes is None else sent_bytes[start:end].tobytes())
            flat[start:end] = np.frombuffer(content, np.uint8)
        received[part][name] = array
    if own is not None:
        return own
    return Saved(
        state=State(counters=head["counters"], **received),
        progress=Progress(**head["progress"]),
        spec=head["spec"],
        meta=head["meta"],
    )


def _head(saved: Saved) -> dict[str, Any]:
    """Return everything in a checkpoint but the arrays' content, as plain values for JSON."""
    return {
        "arrays": [
            (part, name, array.dtype.str, list(array.shape))
            for part in ARRAYS
            for name, array in getattr(saved.state, part).items()
        ],
        "counters": saved.state.counters,
        "progress": asdict(saved.progress),
        "spec": saved.spec,
        "meta": saved.meta,
    }


def _parts(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PART_BYTES):
        yield start, min(start + PART_BYTES, size)
