"""Write TensorBoard events, with TensorBoard's messages and without TensorFlow or torch."""

import io
import itertools
import os
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from mtrain.records.history import points
from mtrain.spec import outputs


# Not the usual `SummaryWriter` classes: they import torch wherever it is installed, but a rank may import only one framework.
class Events:
    """Writes the curves of one run. In a resumed run they replace those written after ``start_update`` before."""

    def __init__(self, folder: Path, *, start_update: int = 0) -> None:
        self._file = EventFile(folder)
        self._event, self._tags = Event(), [""]
        """The last event of numbers, whose tags the next one most often has."""
        if start_update:
            started = SessionLog(status=SessionLog.START)
            self._file.add(Event(wall_time=time.time(), step=start_update, session_log=started))

    def update(self, record: Mapping[str, Any]) -> None:
        """Write losses, learning rate and speed of one update."""
        self._write(points(record), int(record["update"]), at_once=False)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Write the metrics of one evaluation."""
        self._write(points(record), int(record["update"]), at_once=True)

    def image(self, tag: str, content: bytes, *, update: int) -> None:
        """Write an image, given as the content of its file."""
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
        summary = Summary(
            value=[
                Summary.Value(
                    tag=tag, image=Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
                )
            ]
        )
        self._file.add(Event(wall_time=time.time(), step=update, summary=summary), at_once=True)

    def histogram(self, tag: str, counts: Sequence[float], edges: Sequence[float], *, update: int) -> None:
        """Write a histogram of ``counts`` between neighbouring ``edges``, one more of them."""
        from tensorboard.plugins.histogram import metadata as histograms
        from tensorboard.util.tensor_util import make_tensor_proto  # imports clients of cloud storage

        rows = np.array([edges[:-1], edges[1:], counts], dtype=np.float64).T
        metadata = histograms.create_summary_metadata(display_name=None, description=None)
        summary = Summary(value=[Summary.Value(tag=tag, tensor=make_tensor_proto(rows), metadata=metadata)])
        self._file.add(Event(wall_time=time.time(), step=update, summary=summary), at_once=True)

    def close(self) -> None:
        """Write what waits."""
        self._file.flush()

    def _write(self, values: Mapping[str, Any], step: int, *, at_once: bool) -> None:
        """Write one event with every number in ``values``; other values, such as None, are left out."""
        numbers = {tag: float(value) for tag, value in values.items() if isinstance(value, int | float)}
        if self._tags != (tags := list(numbers)):
            entries = [Summary.Value(tag=tag) for tag in tags]
            self._event, self._tags = Event(summary=Summary(value=entries)), tags
        event = self._event
        event.wall_time, event.step = time.time(), step
        for entry, number in zip(event.summary.value, numbers.values(), strict=True):
            entry.simple_value = number
        self._file.add(event, at_once=at_once)


# TensorBoard's own writer hands each event to a thread that computes its checksum byte by byte in Python: a fifth of a
# millisecond for each update, which is much beside an update of five. Here the checksums of the events of some seconds are
# computed at once, by numpy. The events themselves are TensorBoard's messages.
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
