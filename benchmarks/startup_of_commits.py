"""Measure seconds from the command to the start of the ranks, to the end of the first update and to the end of the job,
of the working tree and another commit in turn; medians of the ratios."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.fingerprints.builds import Build, build

CASES = {"solo": ("solo", 1), "ddp x 2": ("ddp", 2)}
"""Backend and number of ranks."""


MARKS = ("ranks' command started", "first update", "end of the job")


def measure(made: Build, backend: str, ranks: int) -> tuple[float, ...]:
    """Train one update of the shipped digits spec; return the seconds to each of ``MARKS``."""
    run = made.folder / "runs" / f"start-{time.monotonic_ns()}"
    words = ["train", "-c", "digits", "--backend", backend, "--nproc-per-node", str(ranks), "--name", run.name]
    values = ["train.updates=1", "train.epochs=null", "evaluate.at_end=false", f"report.dir={run.parent}"]
    pairs = [word for value in values for word in ("-o", value)]
    began = time.time()
    command = [sys.executable, "-m", "mtrain", *words, *pairs]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=made.folder, env=made.environment()) as process:
        while process.poll() is None and not (run / "logs" / "starter.log").exists():
            time.sleep(0.002)
        started = time.time()
        if process.wait():
            raise SystemExit(f"{made.name}: exit code {process.returncode}")
    ended = time.time()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    update = next(row["time"] for row in map(json.loads, lines) if row["kind"] == "update")
    return started - began, update - began, ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare the working tree with")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours = build(None, name="ours", folder=Path(folder, "ours"))
        base = build(arguments.base, name="base", folder=Path(folder, "base"))
        for case in arguments.cases:
            pairs = []
            for turn in range(arguments.runs + 1):
                order = (ours, base) if turn % 2 else (base, ours)
                seconds = {made.name: measure(made, *CASES[case]) for made in order}
                pairs.append((seconds["ours"], seconds["base"]))
            for number, what in enumerate(MARKS):
                a, b = (statistics.median(column[number] for column in side) for side in zip(*pairs[1:], strict=True))
                ratio = statistics.median(x[number] / y[number] for x, y in pairs[1:])
                print(f"{case}: {what}: ours {a:.2f} s  {arguments.base} {b:.2f} s  ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
