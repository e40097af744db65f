"""Write a file of TensorBoard events, many at a time.

TensorBoard's own writer hands each event to a thread that computes its checksum byte by byte in Python: a fifth of a
millisecond for each update, which is much beside an update of five. Here the checksums of the events of some seconds are
computed at once, by numpy. The events themselves are TensorBoard's messages.
"""

import itertools
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event

from mtrain.spec import outputs

WRITTEN_EVERY_S = 5.0
"""Longest time that an event waits for others while updates follow each other."""
WRITTEN_TOGETHER = 256
FEW = 8
"""Messages of one length below which each is taken for itself."""
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _table() -> list[int]:
    words = list(range(256))
    for _ in range(8):
        words = [word >> 1 ^ (_POLYNOMIAL if word & 1 else 0) for word in words]
    return words


_TABLE = _table()
_WORDS = np.array(_TABLE, dtype=np.uint32)
_number = itertools.count()


class EventFile:
    """A file of events in the folder of a run. TensorBoard reads it while it grows."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = f"{time.time():.0f}".zfill(10), socket.gethostname(), os.getpid(), next(_number)
        name = "events.out.tfevents." + ".".join(map(str, place))
        self._path = folder / name
        self._clock = clock
        self._pending: list[bytes] = []
        self._written_at = -float("inf")
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event, *, at_once: bool = False) -> None:
        """Write an event, at once or together with others."""
        self._pending.append(event.SerializeToString())
        is_due = self._clock() - self._written_at >= WRITTEN_EVERY_S
        if at_once or is_due or len(self._pending) >= WRITTEN_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        pending, self._pending = self._pending, []
        if pending:
            with outputs.open_to_write(self._path, "ab") as file:
                file.write(frame(pending))
        self._written_at = self._clock()


def frame(messages: Sequence[bytes]) -> bytes:
    """Return messages as a file of events has them: length, its checksum, message, its checksum."""
    lengths = [struct.pack("<Q", len(message)) for message in messages]
    parts = zip(lengths, checksums(lengths), messages, checksums(messages), strict=True)
    return b"".join(part for length, of_length, message, own in parts for part in (length, of_length, message, own))


def checksums(messages: Sequence[bytes]) -> list[bytes]:
    """Return the masked CRC-32C of each message, four bytes."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        by_length[len(message)].append(place)
    found = [0] * len(messages)
    for places in by_length.values():
        alike = [messages[place] for place in places]
        codes = [_code(message) for message in alike] if len(alike) < FEW else _codes(alike)
        for place, code in zip(places, codes, strict=True):
            found[place] = code
    return [struct.pack("<I", ((code >> 15 | code << 17) + _MASK) & 0xFFFFFFFF) for code in found]


def _code(message: bytes) -> int:
    code, table = 0xFFFFFFFF, _TABLE
    for byte in message:
        code = table[(code ^ byte) & 255] ^ code >> 8
    return code ^ 0xFFFFFFFF


def _codes(messages: Sequence[bytes]) -> list[int]:
    """Return the codes of messages of one length, whose bytes are taken side by side."""
    bytes_LN = np.frombuffer(b"".join(messages), dtype=np.uint8).reshape(len(messages), -1).T.astype(np.uint32)
    codes_N = np.full(len(messages), 0xFFFFFFFF, dtype=np.uint32)
    for bytes_N in bytes_LN:
        codes_N = _WORDS[(codes_N ^ bytes_N) & np.uint32(255)] ^ codes_N >> np.uint32(8)
    return (codes_N ^ np.uint32(0xFFFFFFFF)).tolist()  # type: ignore[no-any-return]
