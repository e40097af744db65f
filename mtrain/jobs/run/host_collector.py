"""The metrics of one host: names, meanings, and how they are read from the files that its ranks write."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mtrain.core.record_files import live_file
from mtrain.jobs.run.metrics_place import AttemptFacts
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes

JOB = {
    "update": ("update", "Updates that the job has finished"),
    "total_updates": ("total_updates", "Updates that the job will have finished at its end"),
    "epoch": ("epoch", "Number of the epoch, from 0"),
    "learning_rate": ("learning_rate", "Learning rate of the last parameter group"),
    "gradient_norm": ("gradient_norm", "Norm of the gradient before clipping"),
    "samples_per_second": ("samples_per_second", "Training samples per second, over all ranks"),
    "mfu": (
        "mfu",
        "Share of the devices' peak that the last update's floating-point operations took, 0 to 1; where it is known",
    ),
    "update_seconds": ("update_seconds", "Seconds that the last update has taken"),
    "data_wait_share": ("data_wait_share", "Share of the last update spent waiting for data, as mean over all ranks"),
    "skipped_updates": ("skipped_updates", "Updates that were skipped because their gradient was not finite"),
    "checkpoint_update": ("checkpoint", "Updates before the newest checkpoint"),
}
"""Metric without its prefix -> key of a rank's file, and help. They are the same on all ranks; the newest file counts."""
NAMED = {
    "loss": ("losses", "loss", "Training loss of the last update, as mean over all ranks"),
    "metric": ("metrics", "metric", "Metric of the last evaluation"),
}
"""Metric -> key, label and help of values that have names."""
RANK = {
    "memory_bytes": ("memory_bytes", "Largest memory of a rank on its device; on a CPU, of its process"),
    "communication_share": (
        "communication_share",
        "Share of the time since the record before in which a rank has waited for others; on CPUs only",
    ),
}
"""Metrics of each rank -> key and help."""


class HostCollector(Collector):
    """Reads the newest metrics of a host's ranks whenever Prometheus asks."""

    def __init__(
        self,
        run_dir: Path,
        *,
        facts: Callable[[], AttemptFacts],
        began: float,
        failed: Callable[[], bool] = lambda: False,
        hangs: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the metrics of the run in ``run_dir``.

        Args:
            run_dir: the run folder.
            facts: returns what only the leader of the job knows.
            began: when the job began on this host, in seconds since 1970.
            failed: returns whether the job has failed.
            hangs: returns whether a rank of the job hangs.
            clock: returns the time in seconds since 1970, as the ranks of this host see it.
        """
        self._run_dir = run_dir
        self._facts = facts
        self._began = began
        self._failed = failed
        self._hangs = hangs
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        facts, now = self._facts(), self._clock()
        ranks = {rank: _read(live_file(self._run_dir, rank)) for rank in facts.ranks}
        # Ranks agree on the values of the job. The newest file is from the rank that wrote last, and others may hang.
        newest = max(ranks.values(), key=lambda metrics: metrics.get("updated_at", 0.0), default={})
        run = self._run_dir.name
        job = InfoMetricFamily("mtrain_job", "What is trained, and with what", labels=["run"])
        words = {key: str(newest[key]) for key in ("backend", "model") if key in newest}
        job.add_metric([run], words)
        yield job
        restarts = CounterMetricFamily("mtrain_restarts", "How often the job was started again", labels=["run"])
        restarts.add_metric([run], facts.restarts)
        yield restarts
        yield _gauge("job_failed", "1 once the job has failed, else 0", ["run"], {(run,): self._failed()})
        yield _gauge("hangs", "1 while a rank is stopped, or nothing moves, else 0", ["run"], {(run,): self._hangs()})
        yield _gauge("hosts", "Hosts that take part in the job", ["run"], {(run,): facts.hosts})
        yield _gauge("ranks", "Ranks of the job on this host", ["run"], {(run,): len(facts.ranks)})
        for name, (key, text) in JOB.items():
            yield _gauge(name, text, ["run"], {(run,): newest.get(key)})
        for name, (key, label, text) in NAMED.items():
            named = {(run, each): value for each, value in newest.get(key, {}).items()}
            yield _gauge(name, text, ["run", label], named)
        for name, (key, text) in RANK.items():
            yield _gauge(name, text, ["run", "rank"], {(run, str(n)): f.get(key) for n, f in ranks.items()})
        yield _gauge(
            "seconds_since_update",
            "Seconds since a rank has finished an update or an evaluation, or since the job began",
            ["run", "rank"],
            {
                (run, str(n)): max(0.0, now - max(float(f.get("updated_at", 0.0)), self._began))
                for n, f in ranks.items()
            },
        )


def _gauge(name: str, text: str, labels: list[str], values: Mapping[Any, Any]) -> Metric:
    """Return a metric; values are by the words of their labels, and those that are not known are left out."""
    family = GaugeMetricFamily(f"mtrain_{name}", text, labels=labels)
    for words, value in values.items():
        if value is not None:
            family.add_metric(list(words), float(value))
    return family


def _read(path: Path) -> Mapping[str, Any]:
    """Return the metrics of one rank; empty while there are none."""
    try:
        return dict(parse_json(read_bytes(path, limit=MAX_OWN_BYTES)))
    except (OSError, ValueError, TypeError):
        return {}
