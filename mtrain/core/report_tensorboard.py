"""TensorBoard events, written without TensorFlow or torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from mtrain.core.report_history import rate_of

SCALARS = ("momentum", "norm", "samples_per_s", "wait_share", "memory_bytes", "skipped")


class Events:
    """The curves of one run; what a resumed run does again replaces what was written after ``start_update``."""

    def __init__(self, folder: Path, *, start_update: int = 0) -> None:
        self._writer = SummaryWriter(logdir=str(folder), purge_step=start_update or None, write_to_disk=True)

    def update(self, record: Mapping[str, Any]) -> None:
        """Losses, rate and speed of one update."""
        step = int(record["update"])
        for name, value in dict(record.get("losses", {})).items():
            self._writer.add_scalar(f"loss/{name}", float(value), step)
        rate = rate_of(record)
        if rate is not None:
            self._writer.add_scalar("train/rate", rate, step)
        for name in SCALARS:
            if isinstance(record.get(name), int | float):
                self._writer.add_scalar(f"train/{name}", float(record[name]), step)

    def evaluation(self, figures: Mapping[str, float], *, update: int) -> None:
        """Figures of one evaluation."""
        for name, value in figures.items():
            self._writer.add_scalar(f"evaluation/{name}", float(value), update)

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()
