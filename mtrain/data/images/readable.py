"""Check which of many pictures can be decoded, before a job relies on them."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mtrain.data.images.decode import decode
from mtrain.data.images.header import MAX_PIXELS, PictureError, probe

_REDUCE = 8
"""Scale at which JPEGs are decoded (an eighth): all data is read, most of the transform is skipped."""
_MAX_THREADS = 4
"""Decoding threads. Each holds one decoded picture; decoders release the interpreter lock."""


def unreadable(files: Sequence[Path], *, max_pixels: int = MAX_PIXELS) -> dict[Path, str]:
    """Map each file that cannot be decoded to its reason, in the order of ``files``; readable files are left out."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        reasons = pool.map(lambda file: _reason(file, max_pixels=max_pixels), files)
        return {file: reason for file, reason in zip(files, reasons, strict=True) if reason is not None}


def _reason(file: Path, *, max_pixels: int) -> str | None:
    try:
        width, height = probe(file)
        rows, columns = decode(file, reduce=_REDUCE, max_pixels=max_pixels).shape[:2]
    except PictureError as error:
        return error.reason
    if (rows, columns) != (-(-height // _REDUCE), -(-width // _REDUCE)):
        return f"its header says {width} x {height} pixels, its data do not have that size"
    return None
