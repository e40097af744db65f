"""Whether one way of training reaches the accuracy of another: many seeds on both sides, one judge, one test.

    python benchmarks/accuracy.py run PAIR.yml RESULTS.jsonl [--seeds 10] [--set NAME=VALUE ...]
    python benchmarks/accuracy.py report PAIR.yml RESULTS.jsonl

A pair (``benchmarks/pairs/*.yml``) names two sides, each as the command that trains one seed, and one judge: the command
that scores the weights of either. The file fixes the seeds, the metric and the test before anything runs. The sides take
turns, and which one begins changes with the seed. Each run appends one line to RESULTS; a run that is there already is
not repeated, so a study can be cut off and go on. Runs of a seed that another process has begun are not excluded:
start one process per file of results.

The report tests the first side against the second by Welch's test, one-sided ("the first is worse"), for each metric
that the pair names, and says which difference the test would have found: with what probability it finds the pair's
``difference``, the least difference that it finds with a probability of 0.8, and how many seeds a side would need.
"""

import argparse
import glob
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
POWER = 0.8
"""Probability of finding a difference that a study should have."""


@dataclass(frozen=True, slots=True)
class Side:
    """How one side trains, and what of it is judged."""

    name: str
    train: Sequence[str]
    """Words of the command; ``{seed}``, ``{folder}`` and the pair's values are replaced."""
    judged: Sequence[str]
    """Words that tell the judge what to score; a word with ``*`` becomes the last path that it matches."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A study: what runs, what is measured, how it is tested."""

    sides: tuple[Side, Side]
    judge: Sequence[str]
    metrics: Sequence[str]
    """The first decides; the others are reported."""
    seeds: int
    level: float
    difference: float
    values: Mapping[str, str]


def main() -> int:
    """Run a study, or report one."""
    arguments = parsed()
    pair = read_pair(arguments.pair, dict(text.split("=", 1) for text in arguments.set))
    if arguments.do == "report":
        print(report(pair, read_results(arguments.results)))
        return 0
    seeds = pair.seeds if arguments.seeds is None else arguments.seeds
    for seed, side in turns(pair, seeds, read_results(arguments.results)):
        if arguments.only not in (None, side.name):
            continue
        row = one_run(pair, side, seed)
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{side.name} seed {seed}: {pair.metrics[0]} {row['metrics'][pair.metrics[0]]:.3f}", flush=True)
    return 0


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["run", "report"])
    parser.add_argument("pair", type=Path, help="file of the study")
    parser.add_argument("results", type=Path, help="file of JSON lines, one for each run")
    parser.add_argument("--seeds", type=int, help="how many a side, in place of the pair's")
    parser.add_argument(
        "--only", metavar="SIDE", help="run this side alone, where the other one's lines are there already"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a value of the pair")
    return parser.parse_args()


def read_pair(path: Path, given: Mapping[str, str]) -> Pair:
    """Read a study. Ends the program if ``given`` leaves out a value that the file does not have."""
    text = yaml.safe_load(path.read_text())
    values = {"python": sys.executable, **text["values"], **given}
    missing = sorted(name for name, value in values.items() if value is None)
    if missing:
        raise SystemExit(f"{path} needs {', '.join(missing)}: give --set {missing[0]}=...")
    first, second = (
        Side(name, side["train"], side["judged"], side.get("environment", {})) for name, side in text["sides"].items()
    )
    keys = ("judge", "metrics", "seeds", "level", "difference")
    return Pair((first, second), **{key: text[key] for key in keys}, values=values)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the runs that are finished."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def turns(pair: Pair, seeds: int, done: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Side]]:
    """Return the runs that are left, seed by seed; the side that begins changes from seed to seed."""
    finished = {(row["seed"], row["side"]) for row in done}
    for seed in range(seeds):
        for side in pair.sides if seed % 2 == 0 else reversed(pair.sides):
            if (seed, side.name) not in finished:
                yield seed, side


def one_run(pair: Pair, side: Side, seed: int) -> dict[str, Any]:
    """Train one seed, have it judged, and return the line of the results."""
    folder = Path(tempfile.mkdtemp(prefix=f"{side.name}-{seed}-"))
    values = {**pair.values, "seed": str(seed), "folder": str(folder)}
    environment = {**os.environ, **THREADS, **{k: v.format(**values) for k, v in side.environment.items()}}
    began, used = time.monotonic(), _children_s()
    started([word.format(**values) for word in side.train], environment, folder)
    trained_s, cpu_s = time.monotonic() - began, _children_s() - used
    judged = [latest(word.format(**values)) for word in side.judged]
    judge_values = {**values, "folder": str(folder / "judge")}
    judge = [word.format(**judge_values) for word in pair.judge]
    started([*judge, *judged], {**os.environ, **THREADS}, folder)
    metrics = judged_metrics(folder / "judge")
    shutil.rmtree(folder)
    return {
        "side": side.name,
        "seed": seed,
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(trained_s, 1),
        "metrics": metrics,
    }


def started(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Run one command. Ends the program with the last lines of its output if it fails, and keeps the folder."""
    result = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {result.returncode}; {folder}\n{result.stdout[-3000:]}")


def latest(word: str) -> str:
    """Return the last path that a word with ``*`` matches, and any other word as it is."""
    if "*" not in word:
        return word
    found = sorted(glob.glob(word))
    if not found:
        raise SystemExit(f"nothing matches {word}: the training has not written what is to be judged")
    return found[-1]


def judged_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the only evaluation below a folder."""
    (path,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    metrics: dict[str, float] = next(row["metrics"] for row in reversed(rows) if row.get("metrics"))
    return metrics


def report(pair: Pair, results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each metric, and what the test could have found."""
    names = [side.name for side in pair.sides]
    lines = [
        f"| metric | {names[0]}: mean (deviation), n | {names[1]} | difference | p ({names[0]} is worse) | "
        f"power for {pair.difference:g} | found with {POWER:g} | seeds for {pair.difference:g} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for metric in pair.metrics:
        ours, theirs = (
            np.array([row["metrics"][metric] for row in results if row["side"] == name], dtype=float) for name in names
        )
        lines.append(f"| {metric} | {_row(Comparison(ours, theirs, pair.level), pair.difference)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Two samples and Welch's one-sided test of "the first has the smaller mean"."""

    ours: np.ndarray[tuple[int], np.dtype[np.float64]]
    theirs: np.ndarray[tuple[int], np.dtype[np.float64]]
    level: float

    def difference(self) -> float:
        """Return the first mean less the second."""
        return float(self.ours.mean() - self.theirs.mean())

    def p(self) -> float:
        """Return the probability of such a difference, or a more negative one, between equal sides."""
        from scipy.stats import ttest_ind

        return float(ttest_ind(self.ours, self.theirs, equal_var=False, alternative="less").pvalue)

    def power(self, difference: float, *, seeds: int | None = None) -> float:
        """Return the probability that the test finds a true ``difference``, with the deviations that were seen.

        ``seeds``: of each side; None: as many as there are.
        """
        from scipy.stats import nct, t

        sizes = (len(self.ours), len(self.theirs)) if seeds is None else (seeds, seeds)
        shares = [float(side.var(ddof=1)) / n for side, n in zip((self.ours, self.theirs), sizes, strict=True)]
        error = math.sqrt(sum(shares))
        if error == 0:
            return 1.0
        freedom = sum(shares) ** 2 / sum(share**2 / (n - 1) for share, n in zip(shares, sizes, strict=True))
        return float(nct.sf(t.isf(self.level, freedom), freedom, difference / error))

    def detectable(self) -> float:
        """Return the least difference that the test finds with the wanted power."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(middle) >= POWER else (middle, high)
        return high

    def seeds_for(self, difference: float) -> int:
        """Return how many seeds a side find ``difference`` with the wanted power; 9999 for more than that."""
        return next((n for n in range(2, 9999) if self.power(difference, seeds=n) >= POWER), 9999)


def _row(compared: Comparison, difference: float) -> str:
    sides = " | ".join(
        f"{side.mean():.3f} ({side.std(ddof=1):.3f}), {len(side)}" for side in (compared.ours, compared.theirs)
    )
    figures = f"{compared.difference():+.3f} | {compared.p():.3f} | {compared.power(difference):.2f}"
    return f"{sides} | {figures} | {compared.detectable():.3f} | {compared.seeds_for(difference)}"


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
