"""A checkpoint goes anywhere: saved under one backend, resumed under another and on another number of ranks.

``python -m tests.parity.matrix [--backends ddp,fleet,...] [--ranks 1,2,3] [--precision fp32] [--quick] [--every]``
prints the table; exit code 1 when something in it is wrong. Every row is one real job of 20 updates, which saves after
update 10 (2 ranks; solo: 1); every cell is one more, which goes on from that checkpoint. What it has at the end is
compared with what the row's own job has, which was never interrupted: weights, moments, averages, losses, norms, and
exactly: learning rates, momentum, place in the epoch, counters.

Rows whose checkpoints hold the same bits share the jobs that go on from them, unless ``--every`` is given: most rows on
torch do.

The job is ``small/small.yml``. Its batches are cut differently on one, two and three ranks, yet mean the same: the loss
is a mean over samples, synchronised BatchNorm takes the statistics of all ranks, accumulation is the spec's. So in
float64 all cells agree to rounding, whatever the number of ranks. Without ``sync_batchnorm`` they could not: order of
samples, schedule and global batch stay on other numbers of ranks, but each rank would normalise by fewer or more
samples.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None

from mtrain.core.checkpoint.store import load  # noqa: E402
from mtrain.core.interfaces import State  # noqa: E402
from mtrain.core.state.digest import digest  # noqa: E402
from mtrain.spec import plugins  # noqa: E402
from tests.parity import jobs  # noqa: E402

SPEC = Path(__file__).parent / "small" / "small.yml"
STACKS: Mapping[str, Mapping[str, Any]] = {
    "solo": {},
    "ddp": {},
    "horovod": {},
    "deepspeed-1": {"stage": 1},
    "deepspeed-2": {"stage": 2},
    # without the threshold weights as small as these would stay whole on every rank
    "deepspeed-3": {"stage": 3, "config.zero_optimization.stage3_param_persistence_threshold": 0},
    "fleet": {},
    "fsdp": {},
}
"""Name -> the backend's options; the part before the dash is the backend."""
SIZES = (1, 2, 3)
HALF, WHOLE = 10, 20
"""Updates: where a row saves, and where all jobs end."""
BOUNDS = {"fp64": 1e-9, "fp32": 1e-5}
"""Largest relative difference between jobs that round differently."""
EXACT = ("update", "epoch", "position", "learning_rates", "momentum", "skipped_updates")
"""Of the record of an update: these are functions of the spec."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A backend with its options on a number of ranks."""

    name: str
    ranks: int

    @property
    def backend(self) -> str:
        """Its plugin."""
        return self.name.partition("-")[0]

    @property
    def framework(self) -> str:
        """Whose arithmetic it is."""
        return framework_of(self.backend)

    def __str__(self) -> str:
        return f"{self.name} x{self.ranks}"

    def arguments(self) -> list[str]:
        """Return the arguments of ``mtrain train``."""
        options = [
            word for key, value in STACKS[self.name].items() for word in ("-o", f"backend.options.{key}={value}")
        ]
        return ["--backend", self.backend, "--nproc-per-node", str(self.ranks), *options]


@cache
def framework_of(backend: str) -> str:
    """Return the framework of a backend with its default options."""
    loaded: Any = plugins.load("backends", backend)
    return str(loaded(loaded.Options()).framework)


def installed() -> list[str]:
    """Names of ``STACKS`` whose backend can run here."""
    known_names = {entry.name for entry in plugins.names("backends") if entry.is_installed}
    return [name for name in STACKS if name.partition("-")[0] in known_names]


def writer(name: str) -> Stack:
    """The stack of a row."""
    return Stack(name=name, ranks=1 if name == "solo" else 2)


def readers(name: str, sizes: Sequence[int]) -> list[Stack]:
    """The stacks of a column: solo has one rank."""
    return [Stack(name=name, ranks=ranks) for ranks in sizes if ranks == 1 or name != "solo"]


@dataclass(frozen=True, kw_only=True)
class Half:
    """The second half of a job, from update 10 to its end."""

    state: State = field(repr=False)
    progress: Any
    records: Sequence[Mapping[str, Any]]
    """Of its updates."""

    @classmethod
    def of(cls, run: Path) -> "Half":
        """Read the second half of the finished job in ``run``."""
        saved = load(run / "checkpoints" / f"step-{WHOLE:08d}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        updates = [row for row in rows if row["kind"] == "update" and row["update"] >= HALF]
        return cls(state=saved.state, progress=saved.progress, records=updates)

    def series(self) -> dict[str, jobs.Array]:
        """Losses and norms, update by update."""
        return {
            "loss": np.array([record["losses"]["total"] for record in self.records]),
            "norm": np.array([record["gradient_norm"] for record in self.records]),
        }

    def arrays(self) -> dict[str, Mapping[str, jobs.Array]]:
        """The parts of the state."""
        return {"weights": self.state.weights, "ema": self.state.ema, "moments": self.state.moments}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How far a continued job is from the one that was never interrupted."""

    problems: Sequence[str]
    """What is not as it must be; empty: all is well."""
    differences: Mapping[str, float] = field(default_factory=dict)
    """Largest relative difference by part."""
    identical: bool = False
    """Every number is the same to the last bit."""

    @property
    def text(self) -> str:
        """A few characters for the table."""
        if not self.differences:
            return "failed"
        return ("=" if self.identical else f"{max(self.differences.values()):.0e}") + (" !" if self.problems else "")


def compare(whole: Half, continued: Half, *, bitwise: bool, bound: float) -> Cell:
    """``bitwise``: nothing but the same bits will do; else every difference is within ``bound``."""
    problems = [
        f"update {theirs['update']}: {key} is {ours[key]}, expected {theirs[key]}"
        for ours, theirs in zip(continued.records, whole.records, strict=False)
        for key in EXACT
        if ours[key] != theirs[key]
    ]
    if len(continued.records) != len(whole.records):
        problems.append(f"{len(continued.records)} updates, expected {len(whole.records)}")
        return Cell(problems=problems)
    if continued.progress != whole.progress:
        problems.append(f"progress is {continued.progress}, expected {whole.progress}")
    if continued.state.counters != whole.state.counters:
        problems.append(f"counters are {continued.state.counters}, expected {whole.state.counters}")
    actual = {part: float(jobs.curve(a, continued.series()[part]).max()) for part, a in whole.series().items()}
    identical = all(same_bits(a, continued.series()[part]) for part, a in whole.series().items())
    for part, arrays in whole.arrays().items():
        others = continued.arrays()[part]
        if arrays.keys() != others.keys():
            problems.append(f"{part}: other names: {sorted(arrays.keys() ^ others.keys())}")
            return Cell(problems=problems)
        actual[part] = max((jobs.relative(array, others[name]) for name, array in arrays.items()), default=0.0)
        identical = identical and all(same_bits(array, others[name]) for name, array in arrays.items())
    if bitwise and not identical:
        problems.append(f"not the same bits: {told(actual)}")
    if not max(actual.values()) <= bound:
        problems.append(f"farther apart than {bound:.0e}: {told(actual)}")
    return Cell(problems=problems, differences=actual, identical=identical)


def same_bits(a: jobs.Array, b: jobs.Array) -> bool:
    """Type and shape too."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def told(differences: Mapping[str, float]) -> str:
    """For a person."""
    return ", ".join(f"{part} {value:.1e}" for part, value in differences.items())


def content(checkpoint: Path) -> str:
    """A digest of all that a job takes from a checkpoint: its arrays, its place, what the writer knew of the task."""
    saved = load(checkpoint)
    rest = repr((saved.progress, saved.state.counters, saved.meta["extra"]))
    return " ".join([*(digest(getattr(saved.state, part)) for part in jobs.PARTS), rest])


class Matrix:
    """Runs jobs below ``folder``; a row is run once, and a column once for each checkpoint that differs in a bit.

    ``every``: once for each row.
    """

    def __init__(self, folder: Path, precision: str = "fp64", *, every: bool = False) -> None:
        self.folder = folder
        self.precision = precision
        self.jobs = 0
        """Run so far."""
        self._every = every
        self._rows: dict[Stack, Path] = {}
        self._found: dict[tuple[Stack, str], Half] = {}

    def saved(self, row: Stack) -> Path:
        """The run folder of a row's job, which was never interrupted."""
        if row not in self._rows:
            name = f"saved-{row.name}"
            self._train(row, name)
            self._rows[row] = self.folder / name
        return self._rows[row]

    def hand_over(self, row: Stack, name: str) -> Path:
        """A new run folder with the row's checkpoint of update 10 in it, and nothing else."""
        half = self.saved(row) / "checkpoints" / f"step-{HALF:08d}"
        target = self.folder / name
        shutil.copytree(half, target / "checkpoints" / half.name)
        return target

    def go_on(self, column: Stack, run: Path, *more: str) -> None:
        """Resume ``run`` under ``column``, to the end; ``more``: arguments of ``mtrain train``."""
        self._train(column, run.name, "--resume", str(run), *more)

    def judge(self, row: Stack, column: Stack, continued: Half) -> Cell:
        """Return the verdict. Equal frameworks on as many ranks must give the same bits."""
        bitwise = (row.framework, row.ranks) == (column.framework, column.ranks)
        return compare(Half.of(self.saved(row)), continued, bitwise=bitwise, bound=BOUNDS[self.precision])

    def cell(self, row: Stack, column: Stack) -> Cell:
        """One cell; a job that fails is a problem of its cell."""
        try:
            key = column, row.name if self._every else content(self.saved(row) / "checkpoints" / f"step-{HALF:08d}")
            if key not in self._found:
                run = self.hand_over(row, f"{row.name}-to-{column.name}-{column.ranks}")
                self.go_on(column, run)
                self._found[key] = Half.of(run)
                shutil.rmtree(run)
        except AssertionError as error:
            return Cell(problems=[f"a job failed: {str(error).strip().splitlines()[-1]}"])
        return self.judge(row, column, self._found[key])

    def _train(self, stack: Stack, name: str, *more: str) -> None:
        self.jobs += 1
        values = {"report.dir": self.folder, "train.precision": self.precision}
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        jobs.mtrain("train", "-c", str(SPEC), *stack.arguments(), "--name", name, *pairs, *more)


def show(matrix: Matrix, names: Sequence[str], sizes: Sequence[int], say: Callable[[str], None]) -> dict[str, Cell]:
    """Fill the matrix and print it, a table for each number of ranks."""
    cells: dict[str, Cell] = {}
    for size in sizes:
        columns = [stack for name in names for stack in readers(name, [size])]
        say(f"\nresumed on {size} rank{'s' if size > 1 else ''}")
        say(f"{'saved by':<16}" + "".join(f"{column.name:>13}" for column in columns))
        for row in map(writer, names):
            actual = {column: matrix.cell(row, column) for column in columns}
            say(f"{row!s:<16}" + "".join(f"{cell.text:>13}" for cell in actual.values()))
            cells |= {f"{row} to {column}": cell for column, cell in actual.items()}
    return cells


def summary(cells: Mapping[str, Cell], matrix: Matrix, seconds: float) -> list[str]:
    """Return the lines after the tables."""
    same = sum(cell.identical for cell in cells.values())
    rounded = {path: cell for path, cell in cells.items() if cell.differences and not cell.identical}
    lines = [
        f"{len(cells)} cells from {matrix.jobs} jobs in {matrix.precision}, {seconds / 60:.0f} minutes: {same} with the same bits as the "
        f"job that was never interrupted (=), {len(rounded)} rounded differently"
    ]
    if rounded:
        parts = next(iter(rounded.values())).differences
        largest = {part: max(cell.differences[part] for cell in rounded.values()) for part in parts}
        lines.append(
            f"largest relative differences of these (allowed: {BOUNDS[matrix.precision]:.0e}): {told(largest)}"
        )
    return lines + [f"{path}: {problem}" for path, cell in cells.items() for problem in cell.problems]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the matrix; 1 when a cell is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="tests.parity.matrix", description="checkpoints from everywhere to everywhere"
    )
    parser.add_argument("--backends", help=f"comma-separated, of {', '.join(STACKS)}; default: all that are installed")
    parser.add_argument("--ranks", default=None, help="comma-separated numbers of ranks to resume on; default: 1,2,3")
    parser.add_argument("--precision", choices=tuple(BOUNDS), default="fp64")
    parser.add_argument("--quick", action="store_true", help="resume on two ranks only")
    parser.add_argument("--every", action="store_true", help="a job for each cell, also behind equal checkpoints")
    arguments = parser.parse_args(argv)
    names = arguments.backends.split(",") if arguments.backends else installed()
    if unknown := [name for name in names if name not in installed()]:
        parser.error(f"--backends: {', '.join(unknown)} not installed here; there are {', '.join(installed())}")
    sizes = [int(size) for size in (arguments.ranks or ("2" if arguments.quick else "1,2,3")).split(",")]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), arguments.precision, every=arguments.every)
        cells = show(matrix, names, sizes, lambda line: print(line, flush=True))
    print("", *summary(cells, matrix, time.monotonic() - began), sep="\n")
    return 1 if any(cell.problems for cell in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
