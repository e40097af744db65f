"""A checkpoint goes anywhere: a few cells of the matrix on every run, a cell for every pair of neighbours when slow
tests run."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from mtrain.core.checkpoint import format as files
from tests.parity import matrix
from tests.parity.matrix import HALF, SIZES, STACKS, Cell, Half, Matrix, Stack, readers, writer

FAST = [("deepspeed-3", "ddp", 2), ("fleet", "ddp", 1)]
"""Saved by, resumed by, on so many ranks."""
RING = [
    (name, list(STACKS)[(place + 1) % len(STACKS)], size)
    for place, name in enumerate(STACKS)
    for size in SIZES
    if size == 1 or list(STACKS)[(place + 1) % len(STACKS)] != "solo"
]
"""Every stack once as writer and once as reader on each number of ranks; `make checkpoint-matrix` has all pairs."""
SAME = [(name, name, writer(name).ranks) for name in STACKS]

FAR = 1000 * matrix.BOUNDS["fp64"]
"""What a fault moves; rounding moves a millionth of it."""


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.job
@pytest.mark.parametrize(
    ("row", "column", "ranks"),
    [*FAST, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [*SAME, *RING] if cell not in FAST)],
)
def test_a_checkpoint_goes_on_elsewhere(
    filled: Matrix,
    row: str,
    column: str,
    ranks: int,
) -> None:
    """Ten updates there, ten more here: what the writer alone has after twenty."""
    assert {row, column} <= set(matrix.installed())
    cell = filled.cell(writer(row), Stack(name=column, ranks=ranks))
    print(f"{row} to {column} x{ranks}: {cell.text} {matrix.told(cell.differences)}")
    assert cell.problems == []


@pytest.fixture(scope="session")
def alone(filled: Matrix) -> Callable[..., Cell]:
    """Return a function that resumes a job of solo under solo after a change to its checkpoint folder, with further
    arguments, and judges the cell."""

    def judged(name: str, change: Callable[[Path], None], *more: str) -> Cell:
        solo = writer("solo")
        run = filled.hand_over(solo, f"tampered-{name}")
        change(run / "checkpoints" / f"step-{HALF:08d}")
        filled.go_on(solo, run, *more)
        return filled.judge(solo, Stack(name="solo", ranks=2), Half.of(run))  # rounding is allowed

    return judged


def rewritten(change: Callable[[files.Saved], None]) -> Callable[[Path], None]:
    """An intact checkpoint with other content."""

    def rewrite(folder: Path) -> None:
        saved = files.load(folder)
        change(saved)
        folder.rename(folder.with_name("former"))
        files.write(folder, saved)

    return rewrite


def without_momentum(saved: files.Saved) -> None:
    saved.state.moments = {name: 0 * array for name, array in saved.state.moments.items()}


def without_average(saved: files.Saved) -> None:
    saved.state.ema = {}


def without_statistics(saved: files.Saved) -> None:
    weights = saved.state.weights
    saved.state.weights = {**weights, **{name: 0 * x for name, x in weights.items() if name.endswith("running_mean")}}


def one_update_back(saved: files.Saved) -> None:
    before = saved.progress
    per_update = before.samples // before.update
    saved.progress = replace(before, update=HALF - 1, position=before.position - 1, samples=before.samples - per_update)


@pytest.mark.slow
class TestThePlantedFaultIsNoticed:
    """State that a continued job could have lost is noticed as missing."""

    @pytest.mark.parametrize(
        ("lost", "part"), [(without_momentum, "moments"), (without_average, "ema"), (without_statistics, "weights")]
    )
    def test_in_the_arrays(self, alone: Callable[..., Cell], lost: Callable[[files.Saved], None], part: str) -> None:
        cell = alone(part, rewritten(lost))
        assert cell.differences[part] > FAR
        assert len(cell.problems) == 1

    def test_in_the_order_of_the_samples(self, alone: Callable[..., Cell]) -> None:
        cell = alone("order", lambda folder: None, "-o", "train.seed=1")
        assert cell.differences["loss"] > FAR

    def test_in_the_schedule(self, alone: Callable[..., Cell]) -> None:
        problems = alone("schedule", lambda folder: None, "-o", "schedule.warmup.updates=16").problems
        assert any(problem.startswith("update 10: learning_rates is ") for problem in problems), problems

    def test_in_the_place(self, alone: Callable[..., Cell]) -> None:
        cell = alone("place", rewritten(one_update_back))
        assert cell.problems[0].startswith("counters are ")
        assert cell.differences["weights"] > FAR


def half(updates: int = 2) -> Half:
    """Return the second half of a job that never ran."""
    record = dict.fromkeys(matrix.EXACT, 0)
    records = [{**record, "update": HALF + i, "losses": {"total": 1.0}, "gradient_norm": 1.0} for i in range(updates)]
    return Half(state=matrix.State(), progress=None, records=records)


def test_bits_are_asked_for_only_where_they_can_be_had() -> None:
    ours, theirs = half(), half()
    theirs.records[0]["gradient_norm"] = 1 + 1e-12
    assert matrix.compare(ours, theirs, bitwise=False, bound=1e-9).problems == []
    assert matrix.compare(ours, theirs, bitwise=False, bound=1e-9).text == "1e-12"
    assert matrix.compare(ours, theirs, bitwise=True, bound=1e-9).text == "1e-12 !"
    assert matrix.compare(ours, half(), bitwise=True, bound=1e-9).text == "="


@pytest.mark.parametrize("key", [key for key in matrix.EXACT if key != "update"])
def test_what_follows_from_the_spec_may_not_differ_at_all(key: str) -> None:
    theirs = half()
    theirs.records[1][key] = 1e-15
    assert matrix.compare(half(), theirs, bitwise=False, bound=1e-9).problems == [
        f"update {HALF + 1}: {key} is 1e-15, expected 0"
    ]


def test_solo_has_one_rank() -> None:
    assert [stack.ranks for stack in readers("solo", SIZES)] == [1]
    assert [stack.ranks for stack in readers("ddp", SIZES)] == [1, 2, 3]


def test_a_half_holds_all_that_a_checkpoint_holds() -> None:
    assert {field.name for field in fields(matrix.State)} == {*half().arrays(), "counters"}
