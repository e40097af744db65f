"""Write TensorBoard events, with TensorBoard's messages and without TensorFlow or torch.

The usual ``SummaryWriter`` classes import torch wherever it is installed, but a rank may import only one framework.
"""

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from mtrain.records.event_file import EventFile
from mtrain.records.history import points


class Events:
    """Writes the curves of one run. In a resumed run they replace those written after ``start_update`` before."""

    def __init__(self, folder: Path, *, start_update: int = 0) -> None:
        self._file = EventFile(folder)
        self._summary = Summary()
        """That of the last update, whose tags the next one most often has."""
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
        if [entry.tag for entry in self._summary.value] == list(numbers):
            for entry, number in zip(self._summary.value, numbers.values(), strict=True):
                entry.simple_value = number
        else:
            entries = [Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
            self._summary = Summary(value=entries)
        self._file.add(Event(wall_time=time.time(), step=step, summary=self._summary), at_once=at_once)
