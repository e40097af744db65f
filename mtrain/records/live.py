"""The newest metrics of each rank in a small file, which the process that watches a host's ranks reads for Prometheus.

The file is ``live/rank-N.json`` of the run folder, which a rank replaces.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mtrain.core.interfaces.reporter import Record, ReportedRun, Reporter
from mtrain.core.record_files import live_file, write_json
from mtrain.spec import outputs

INTERVAL_S = 0.5
"""Least number of seconds between two files of a rank that only updates have changed."""
UPDATE_KEYS = (
    "epoch",
    "losses",
    "gradient_norm",
    "samples_per_second",
    "mfu",
    "skipped_updates",
    "total_updates",
    "update_seconds",
    "data_wait_share",
    "memory_bytes",
)
"""Keys of an update's record that the file has under the same name."""


class LiveFigures(Reporter):
    """Writes the newest metrics of this rank: those of the last update, evaluation and checkpoint.

    Keys of the file: ``backend``, ``model``, ``ranks`` (of the job), ``update`` (updates that are finished),
    ``updated_at`` (seconds since 1970), ``learning_rate`` (of the last parameter group), ``communication_share`` (0 to 1, where it
    is measured), ``metrics`` (of the last evaluation), ``checkpoint``
    (updates before the last one), and those of ``UPDATE_KEYS``. Numbers that are not finite are text: ``nan``, ``inf`` and
    ``-inf``.
    """

    every_rank: ClassVar[bool] = True

    def __init__(
        self,
        options: Any,
        run: ReportedRun,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__(options, run)
        self._path = live_file(run.folder, run.rank)
        self._clock = clock
        self._interval_s = interval_s
        self._written_at = -math.inf
        self._measured: tuple[float, float] | None = None
        """Time of the last update, and the seconds of communication until then."""
        self._metrics: dict[str, Any] = {"ranks": run.size, "update": run.start_update}
        outputs.make_folder(self._path.parent)

    def start(self, record: Record) -> None:
        """Keep what is trained, and with what."""
        self._metrics |= {key: record[key] for key in ("backend", "model", "total_updates") if key in record}
        self._write()

    def update(self, record: Record) -> None:
        """Keep the metrics of an update."""
        self._metrics |= {key: record[key] for key in UPDATE_KEYS if key in record}
        self._metrics |= {
            "update": record["update"] + 1,
            "learning_rate": record.get("learning_rate"),
            "updated_at": record["time"],
        }
        if "communication_s" in record:
            self._measure(float(record["communication_s"]))
        # A file, because another process answers: it lives through restarts, and answers while a rank hangs.
        if self._clock() - self._written_at >= self._interval_s:
            self._write()

    def evaluation(self, record: Record) -> None:
        """Keep the metrics of an evaluation, without those of single classes, of which there may be thousands."""
        metrics = {name: value for name, value in record["metrics"].items() if "/" not in name}
        self._metrics |= {"metrics": metrics, "updated_at": record["time"]}
        self._measured = None  # Ranks wait for each other in an evaluation too, and it belongs to no update.
        self._write()

    def checkpoint(self, record: Record) -> None:
        """Keep the number of updates before a checkpoint."""
        self._metrics["checkpoint"] = record["update"]
        self._write()

    def end(self, record: Record) -> None:
        """Write what is left."""
        self._write()

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self._write()

    def _measure(self, communication_s: float) -> None:
        """Set the share of the time since the record before in which this rank waited for others."""
        now = self._clock()
        if self._measured is not None and now > self._measured[0]:
            share = (communication_s - self._measured[1]) / (now - self._measured[0])
            self._metrics["communication_share"] = min(max(share, 0.0), 1.0)
        self._measured = (now, communication_s)

    def _write(self) -> None:
        self._written_at = self._clock()
        # Replaced in one step, because the watching process may read at any moment.
        write_json(self._path, _word(self._metrics))


def _word(value: Any) -> Any:
    """Return ``value`` with numbers that JSON cannot hold as text."""
    if isinstance(value, Mapping):
        return {key: _word(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
