"""What a job of two ranks holds over a simulated day: memory of the ranks and of the process that started them, and files.

``day_script.py`` is the training. Held are the values after a sixth of the day and at its end, so that what a start leaves
behind does not count; the largest of both ranks.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SIZES = (2_160, 8_640, 17_280)
"""Updates. The last one is a day with an update every five seconds."""


def day(updates: int) -> dict[str, Any]:
    """Train for so many updates; return what leader and ranks hold, and how much more than after a sixth of them."""
    script = ROOT / "benchmarks" / "growth" / "day_script.py"
    words = [
        "--nproc-per-node",
        "2",
        "--backend",
        "ddp",
        "--name",
        "day",
        "-o",
        "report.display=quiet",
        "checkpoint.keep_last=3",
        "report.plots=false",
    ]
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "mtrain", "run", *words, str(script), "--updates", str(updates)]
        with open(Path(folder) / "console", "wb") as console:
            leader = psutil.Popen(argv, cwd=folder, stdout=console, stderr=console)
            sampled: list[tuple[float, float]] = []
            sampler = threading.Thread(target=_sample, args=(leader, sampled), daemon=True)
            sampler.start()
            code = leader.wait()
            sampler.join()
        if code:
            raise subprocess.CalledProcessError(code, argv, (Path(folder) / "console").read_text())
        row: dict[str, Any] = {"updates": updates}
        held = [
            [json.loads(line) for line in (Path(folder) / f"held-{rank}.jsonl").read_text().splitlines()]
            for rank in range(2)
        ]
        early = len(held[0]) // 6
        for key in ("rss_mib", "python_kib", "files", "threads"):
            row[f"rank_{key}"] = max(each[-1][key] for each in held)
            row[f"rank_{key}_more"] = max(each[-1][key] - each[early][key] for each in held)
        row |= _leader(sampled)
        run = Path(folder) / "runs" / "day"
        row["metrics_mb"] = (run / "metrics.jsonl").stat().st_size / 1e6
        row["logs_mb"] = sum(path.stat().st_size for path in (run / "logs").rglob("*") if path.is_file()) / 1e6
        row["checkpoints"] = len([path for path in (run / "checkpoints").iterdir() if path.is_dir()])
        row["run_files"] = sum(path.is_file() for path in run.rglob("*"))
    return row


def _leader(sampled: list[tuple[float, float]]) -> dict[str, float]:
    began, ended = sampled[0][0], sampled[-1][0]
    early = next(rss for at, rss in sampled if at >= began + (ended - began) / 6)
    return {"leader_rss_mib": sampled[-1][1], "leader_rss_mib_more": sampled[-1][1] - early}


def _sample(process: psutil.Process, sampled: list[tuple[float, float]]) -> None:
    while True:
        try:
            rss = process.memory_info().rss / (1 << 20)
        except psutil.Error:
            return
        if rss == 0:
            return
        sampled.append((time.monotonic(), rss))
        time.sleep(0.2)


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.day day UPDATES``."""
    print(json.dumps(day(int(sys.argv[2]))))


if __name__ == "__main__":
    main()
