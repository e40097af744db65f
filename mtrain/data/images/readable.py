"""Check which of many images can be decoded, before a job relies on them."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mtrain.data.images.decode import decode_bytes
from mtrain.data.images.header import MAX_PIXELS, ImageError, probe_bytes, read_image, reason_of
from mtrain.data.reading import listed
from mtrain.errors import DataError

_REDUCE = 8
"""Scale at which JPEGs are decoded (an eighth): all data is read, most of the transform is skipped."""
_MAX_THREADS = 4
"""Decoding threads. Each holds one decoded image; decoders release the interpreter lock."""
K = TypeVar("K")


def unreadable(files: Sequence[Path], *, max_pixels: int = MAX_PIXELS) -> dict[Path, str]:
    """Map each file that cannot be decoded to its reason, in the order of ``files``; readable files are left out."""
    return undecodable(files, read_image, max_pixels=max_pixels)


def need_readable(files: Sequence[Path], *, max_pixels: int) -> None:
    """Refuse images that cannot be decoded.

    Raises:
        DataError: there are some; the first ones are named with the reason, the rest counted.
    """
    problems = [f"{file}: {reason}" for file, reason in unreadable(files, max_pixels=max_pixels).items()]
    if problems:
        raise DataError(f"{len(problems)} of {len(files)} images cannot be read:\n{listed(problems)}")


def undecodable(keys: Iterable[K], read: Callable[[K], bytes], *, max_pixels: int = MAX_PIXELS) -> dict[K, str]:
    """Map each key whose image cannot be decoded to the reason; ``read`` returns the image's encoded content.

    ``read`` is called in several threads at once.
    """
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    keys = list(keys)
    with ThreadPoolExecutor(threads) as pool:
        reasons = pool.map(lambda key: _reason(read, key, max_pixels=max_pixels), keys)
        return {key: reason for key, reason in zip(keys, reasons, strict=True) if reason is not None}


def _reason(read: Callable[[K], bytes], key: K, *, max_pixels: int) -> str | None:
    try:
        data = read(key)
        width, height = probe_bytes(data, "")
        rows, columns = decode_bytes(data, "", reduce=_REDUCE, max_pixels=max_pixels).shape[:2]
    except OSError as error:
        return reason_of(error)
    except ImageError as error:
        return error.reason
    if (rows, columns) != (-(-height // _REDUCE), -(-width // _REDUCE)):
        return f"its header says {width} x {height} pixels, its data do not have that size"
    return None
