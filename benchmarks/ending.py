"""Measure what happens between SIGTERM at a job of two ranks and its exit, of the working tree and another commit in turn.

Prints a Markdown table: medians of the seconds from the signal to the last checkpoint record, to the last record, to the
end of the last rank and to the exit of mtrain, with the exit code. Only columns of one table can be compared.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.fingerprints.builds import Build, build

BACKENDS = ("ddp", "horovod", "deepspeed", "fleet")
PLACES = {
    "mid-epoch": ["evaluate.every_epochs=null", "train.updates=100000", "train.epochs=null"],
    "mid-evaluation": [
        "evaluate.every_epochs=null",
        "evaluate.every_updates=4",
        "train.updates=100000",
        "train.epochs=null",
    ],
}
MARKS = ("saved", "last record", "ranks gone", "exit")
START_S = 240.0


def records(run: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reach(run: Path, update: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until an update was recorded."""
    deadline = time.monotonic() + START_S
    while not any(row["kind"] == "update" and row["update"] >= update for row in records(run)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{run}: update {update} was not reached (exit code {process.returncode})")
        time.sleep(0.01)


def is_rank(process: psutil.Process) -> bool:
    """Return whether a process is a rank or one of its loader processes."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "mtrain.rank.worker" in process.cmdline()
    except psutil.Error:
        return False


def measure(made: Build, backend: str, place: str, *, cold: bool) -> tuple[dict[str, float], int]:
    """Run a job, signal it; return the seconds to each of ``MARKS``, and the exit code.

    ``cold``: with a home folder without caches, as a new container has it.
    """
    run = made.folder / "runs" / f"ending-{time.monotonic_ns()}"
    home = {"HOME": tempfile.mkdtemp(dir=made.folder)} if cold else {}
    words = ["train", "-c", "digits", "--backend", backend, "--nproc-per-node", "2", "--name", run.name]
    values = [*PLACES[place], f"report.dir={run.parent}", f"data.root={made.folder / 'digits'}"]
    command = [sys.executable, "-m", "mtrain", *words, *[word for value in values for word in ("-o", value)]]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=made.folder, env=made.environment() | home
    ) as process:
        reach(run, 7 if place == "mid-evaluation" else 5, process)
        time.sleep(0.3 if place == "mid-evaluation" else 0.0)
        ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
        asked = time.time()
        process.send_signal(signal.SIGTERM)
        seconds = {}
        while process.poll() is None:
            if "ranks gone" not in seconds and not any(map(is_rank, ranks)):
                seconds["ranks gone"] = time.time() - asked
            time.sleep(0.01)
        seconds["exit"] = time.time() - asked
    seconds.setdefault("ranks gone", seconds["exit"])
    for kind, mark in (("checkpoint", "saved"), ("end", "last record")):
        times = [row["time"] - asked for row in records(run) if row["kind"] == kind and row["time"] > asked]
        seconds[mark] = times[-1] if times else float("nan")
    return seconds, process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="a commit to compare the working tree with")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="without caches of libraries in the home folder")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--places", nargs="*", default=list(PLACES), choices=list(PLACES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = [build(None, name="ours", folder=Path(folder, "ours"))]
        if arguments.base:
            trees.insert(0, build(arguments.base, name=arguments.base, folder=Path(folder, "base")))
        print(f"| backend | SIGTERM in | tree | {' | '.join(MARKS)} | exit codes |")
        print("|---" * (4 + len(MARKS)) + "|")
        for backend in arguments.backends:
            for place in arguments.places:
                results: dict[str, list[tuple[dict[str, float], int]]] = {tree.name: [] for tree in trees}
                for _ in range(arguments.runs):
                    for tree in trees:
                        results[tree.name].append(measure(tree, backend, place, cold=arguments.cold))
                for name, rows in results.items():
                    medians = [f"{statistics.median(seconds[mark] for seconds, _ in rows):.1f}" for mark in MARKS]
                    codes = ", ".join(map(str, sorted({code for _, code in rows})))
                    print(f"| {backend} | {place} | {name} | {' | '.join(medians)} | {codes} |", flush=True)


if __name__ == "__main__":
    main()
