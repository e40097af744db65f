"""The reporter ``visualdl``: parameters, curves and images of a job for VisualDL."""

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.spec import outputs
from mtrain_ui.trackers.tracker import Point, Tracker, TrackerOptions, import_library, parameters

FOLDER = "visualdl"
FILE = "vdlrecords.mtrain.log"
"""VisualDL recognises its files by ``vdlrecords`` in the name, and adds to one that is there."""


class VisualDL(Tracker):
    """Writes the spec, losses, learning rates, metrics and images for VisualDL into ``visualdl/`` of the run folder.

    A resumed job drops what was written after its checkpoint, and goes on in the same file.
    """

    class Options(TrackerOptions):
        """VisualDL has curves and images, and no place for checkpoints."""

    def __init__(self, options: Options, run: ReportedRun) -> None:
        super().__init__(options, run)
        self._make_writer: Any = import_library("visualdl").LogWriter
        self._writer: Any = None

    def open(self) -> None:
        """Begin the file, or go on in it."""
        file = self.run.folder / FOLDER / FILE
        # VisualDL appends, so what a resumed job repeats would be there twice.
        is_new = not file.exists() or not _drop(file, start_update=self.run.start_update)
        self._writer = self._make_writer(
            logdir=str(file.parent), file_name=file.name, display_name=self.run.folder.name, flush_secs=5
        )
        if is_new:
            values = {_allow(name): value for name, value in parameters(self.run.spec)}
            self._writer.add_hparams(values, metrics_list=["loss/total"])

    def send_points(self, points: Sequence[Point]) -> None:
        """See ``Tracker.send_points``."""
        for name, value, update in points:
            self._writer.add_scalar(_allow(name), value, update)

    def send_image(self, name: str, content: bytes, update: int) -> None:
        """See ``Tracker.send_image``."""
        import numpy as np
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            self._writer.add_image(f"evaluation/{_allow(name)}", np.asarray(image.convert("RGB")), update)

    def send_end(self, reason: str, error: str) -> None:
        """See ``Tracker.send_end``."""
        if error:
            self._writer.add_text("mtrain.error", error, 0)
        self._writer.close()


def _allow(name: str) -> str:
    """Return a name without the sign that VisualDL forbids in names."""
    return name.replace("%", "_")


def _drop(file: Path, *, start_update: int) -> bool:
    """Keep the records up to ``start_update``, and no half-written one; return whether any parameters are kept."""
    from visualdl.proto import record_pb2

    content, kept, has_parameters, place = file.read_bytes(), [], False, 0
    while place + 8 <= len(content):  # Each record is its length in eight bytes, and a message of protobuf.
        (length,) = struct.unpack_from("<Q", content, place)
        message, end = content[place + 8 : place + 8 + length], place + 8 + length
        if len(message) < length:
            break
        record = record_pb2.Record.FromString(message)
        if all(_precedes(value, start_update) for value in record.values):
            kept.append(content[place:end])
        has_parameters |= any(value.tag == "hparam" for value in record.values)
        place = end
    outputs.write_bytes(file, b"".join(kept))
    return has_parameters


def _precedes(value: Any, start_update: int) -> bool:
    """Return whether a value belongs to what a job resumed at ``start_update`` does not repeat."""
    if value.tag in ("hparam", "meta_data_tag"):
        return True
    # An evaluation counts the updates before it, an update is named by those before it: it is the one that comes next.
    is_evaluation = value.tag.startswith(("metric/", "evaluation/"))  # its numbers, and its images
    return int(value.id) <= start_update if is_evaluation else int(value.id) < start_update
