"""How the cost of records grows with the updates of a run, and that of the list of runs with their number.

The records are those of a detector's training, written through mtrain's own report; no model is behind them.
"""

import json
import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

UPDATE_SIZES = (1_000, 10_000, 100_000, 1_000_000)
RUN_SIZES = (10, 100, 1_000, 10_000)
EVALUATE_EVERY = 5_000


def record(update: int, total: int) -> dict[str, Any]:
    """Return the record of an update as a detector on two ranks makes it."""
    loss = 3.0 / (1 + update / 1000) + 0.1 * math.sin(update)
    return {
        "update": update,
        "epoch": update // EVALUATE_EVERY,
        "position": update % EVALUATE_EVERY,
        "updates_per_epoch": EVALUATE_EVERY,
        "total_updates": total,
        "losses": {"box": loss * 0.3, "object": loss * 0.5, "class": loss * 0.2, "total": loss},
        "learning_rate": 0.01 * (1 - update / total),
        "learning_rates": [0.01 * (1 - update / total)] * 3,
        "momentum": 0.937,
        "gradient_norm": 2.5 + math.cos(update),
        "skipped_updates": 0,
        "samples_per_second": 112.5 + math.sin(update / 7),
        "data_wait_share": 0.0123 + 0.01 * math.sin(update / 11),
        "update_seconds": 0.5712 + 0.01 * math.sin(update / 7),
        "memory_bytes": 2_123_456_789,
        "communication_s": 0.0421 * update,
        "unit": "images",
        "images_per_second": 112.5 + math.sin(update / 7),
    }


def write(folder: Path, updates: int, *, tensorboard: bool = True) -> float:
    """Write the records of a run that is done; return the CPU microseconds of each update."""
    from mtrain.core.interfaces.reporter import ReportedRun
    from mtrain.records.reporter import Report
    from mtrain.records.reporters.tensorboard import TensorBoard
    from mtrain.records.run_files import RunFiles

    reporters: list[Any] = []
    if tensorboard:
        run = ReportedRun(folder=folder, rank=0, size=2, start_update=0, spec={})
        reporters = [("tensorboard", TensorBoard(TensorBoard.Options(), run))]
    report = Report(RunFiles(folder, plots=False), reporters)
    report.event("start", update=0, epoch=0, total_updates=updates, ranks=2, backend="ddp", model="yolov5n")
    records = [record(update, updates) for update in range(min(updates, 1000))]
    began = time.process_time()
    for update in range(updates):
        report.update({**records[update % len(records)], "update": update})
        if (update + 1) % EVALUATE_EVERY == 0 or update + 1 == updates:
            metrics = {"map": 0.5, "map50": 0.7, "score": 0.5}
            report.evaluation(metrics, update=update + 1, epoch=update // EVALUATE_EVERY + 1, headline=["map", "map50"])
            report.event("checkpoint", update=update + 1, folder="checkpoints", score=None, why="due")
    used = time.process_time() - began
    summary = {"reason": "done", "updates": updates, "total_updates": updates, "backend": "ddp", "ranks": 2}
    report.event("end", **summary)
    report.close(summary)
    return used / updates * 1e6


def updates(count: int) -> dict[str, Any]:
    """Measure writing and reading the records of a run of so many updates. Each reader is a process of its own."""
    row: dict[str, Any] = {"updates": count}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs" / "long"
        folder.mkdir(parents=True)
        before = psutil.Process().memory_info().rss
        row["write_cpu_us"] = write(folder, count)
        row["writer_grows_mib"] = (psutil.Process().memory_info().rss - before) / (1 << 20)
        row["metrics_mb"] = (folder / "metrics.jsonl").stat().st_size / 1e6
        row["events_mb"] = sum(path.stat().st_size for path in folder.rglob("events.*")) / 1e6
        for reader in READERS:
            row |= _in_its_own_process(reader, folder)
        row["report_html_mb"] = (folder / "report.html").stat().st_size / 1e6
    return row


def _in_its_own_process(reader: str, folder: Path) -> dict[str, float]:
    import subprocess

    argv = [sys.executable, "-m", "benchmarks.growth.records", "read", reader, str(folder)]
    printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    return found


def _report(folder: Path) -> None:
    from mtrain_ui.pages import report

    text = report.write(folder).read_text()
    assert "done" in text


def _results(folder: Path) -> None:
    from mtrain.records.plots import draw_results

    assert draw_results(folder)


def _status(folder: Path) -> None:
    from mtrain.commands.results import open_run

    assert open_run(folder).exit_reason == "finished"


def _list(folder: Path) -> None:
    from mtrain_ui.pages.folder import Runs
    from mtrain_ui.pages.overview import Overview

    (entry,) = Overview(Runs(folder.parent)).entries()
    assert entry.share == 100


READERS: dict[str, Callable[[Path], None]] = {"report": _report, "results": _results, "status": _status, "list": _list}


def read(reader: str, folder: Path) -> dict[str, float]:
    """Measure one reader of a run's records, in this process."""
    before, began = psutil.Process().memory_info().rss, time.process_time()
    READERS[reader](folder)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / (1 << 20)
    return {f"{reader}_cpu_s": time.process_time() - began, f"{reader}_peak_mib": peak_mib}


def runs(count: int) -> dict[str, Any]:
    """Measure the list of ``count`` runs of 200 updates: as a browser asks for it first, all of them, and again unchanged."""
    from mtrain_ui.pages.app import MAX_LISTED
    from mtrain_ui.pages.folder import Runs
    from mtrain_ui.pages.overview import Overview

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write(root / "run0", 200, tensorboard=False)
        for number in range(1, count):
            shutil.copytree(root / "run0", root / f"run{number}")
        before, row = psutil.Process().memory_info().rss, {"runs": count}
        began = time.process_time()
        assert len(Overview(Runs(root)).entries(most=MAX_LISTED)) == min(count, MAX_LISTED)
        row["page_first_cpu_s"] = time.process_time() - began
        overview = Overview(Runs(root))
        for again in ("first", "again"):
            began = time.process_time()
            assert len(overview.entries()) == count
            row[f"list_{again}_cpu_s"] = time.process_time() - began
        row["kept_mib"] = (psutil.Process().memory_info().rss - before) / (1 << 20)
    return row


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.records updates|runs NUMBER``."""
    kind = sys.argv[1]
    if kind == "read":
        print(json.dumps(read(sys.argv[2], Path(sys.argv[3]))))
    else:
        print(json.dumps({"updates": updates, "runs": runs}[kind](int(sys.argv[2]))))


if __name__ == "__main__":
    main()
