"""Of several differences between two settings, those that part a training are found, alone or together."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain_trace import bisecting, reading, running
from mtrain_trace.bisecting import Bisection, Bisector

A = "THREADS=1 --lr 0.1 --seed 3"
B = "THREADS=2 --lr 0.1 --compile --seed 4 --workers 2 --name other"
NAMES = ["THREADS", "--seed", "--compile", "--workers", "--name"]


def trace(loss: float) -> reading.Trace:
    described = {"rule": "SGD", "groups": [["w"]], "shapes": {"w": [1]}, "dtypes": ["float32"], "sharded": False}
    update = reading.Update(
        1, losses=[loss], clips=[None], rates=[{"lr": 0.1}], rank_rates=[[{"lr": 0.1}]], groups=[["w"]]
    )
    return reading.Trace(Path(), [{"rank": 0, "ranks": 1, "optimizers": [described]}], [update], {})


def found(
    matters: Callable[[frozenset[str]], bool], a: str = A, b: str = B, *, loss: float = 2.0, bits: bool = False
) -> tuple[Bisection, list[frozenset[str]]]:
    """Bisect a training whose loss is another one where ``matters`` says so of the differences that are taken over."""
    starts: list[frozenset[str]] = []

    class Pretending(Bisector):
        def _train(self, folder: str, taken: frozenset[str]) -> reading.Trace:
            starts.append(taken)
            return trace(loss if matters(taken) else 1.0)

    record = running.RecordingSettings()
    bisector = Pretending(["train"], (a, b), out=Path(), record=record, bits=bits, tell=lambda line: None)
    return bisector.find(), starts


@pytest.mark.parametrize("name", NAMES)
def test_the_one_difference_that_matters_is_found(name: str) -> None:
    result, starts = found(lambda taken: name in taken)
    assert len(result.differences) == 5
    assert [words.split(" -> ")[-1].split()[0].partition("=")[0] for words, _ in result.culprits] == [name]
    assert len(starts) <= 7
    assert len(set(starts)) == len(starts)  # nothing is trained twice


def test_two_differences_that_matter_each_by_itself_are_both_found() -> None:
    result, _ = found(lambda taken: bool(taken & {"--seed", "--name"}))
    assert sorted(words for words, _ in result.culprits) == ["--seed 3 -> --seed 4", "no --name -> --name other"]


def test_differences_that_matter_only_together_are_named_together() -> None:
    result, _ = found(lambda taken: {"THREADS", "--compile"} <= taken)
    assert len(result.culprits) == 1
    assert "no --compile -> --compile, together with THREADS=1 -> THREADS=2" in result.culprits[0][0]


def test_settings_that_train_the_same_are_told_after_two_trainings() -> None:
    result, starts = found(lambda taken: False)
    assert (result.culprits, len(starts)) == ([], 2)


@pytest.mark.parametrize("bits", [False, True])
def test_rounding_parts_two_settings_only_where_bits_are_asked_for(*, bits: bool) -> None:
    result, _ = found(lambda taken: "--seed" in taken, loss=1.0 + 1e-7, bits=bits)
    assert [words for words, _ in result.culprits] == (["--seed 3 -> --seed 4"] if bits else [])
    same, _ = found(lambda taken: False, bits=bits)
    assert same.culprits == []


def test_flags_keep_their_values_and_a_setting_in_which_one_is_missing_loses_it() -> None:
    words = bisecting.parse("A=1 B=x=y --lr -0.5 --betas 0.9 0.99 -v --name='a b'")
    assert {name: choice.words for name, choice in words.items()} == {
        "A": ("1",),
        "B": ("x=y",),
        "--lr": ("--lr", "-0.5"),
        "--betas": ("--betas", "0.9", "0.99"),
        "-v": ("-v",),
        "--name": ("--name=a b",),
    }


@pytest.mark.job
@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("--lr 1", "--lr 1", "both settings are the same"),
        ("train.py", "--lr 1", "neither NAME=VALUE nor a flag"),
        ("-x -x", "", "occurs twice"),
    ],
)
def test_settings_that_mean_nothing_are_one_error(tmp_path: Path, a: str, b: str, message: str) -> None:
    command = [
        sys.executable,
        "-m",
        "mtrain_trace",
        "bisect",
        "--out",
        tmp_path / "t",
        f"--a={a}",
        f"--b={b}",
        "--",
        "true",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--foreach", action="store_true")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=options.decay, foreach=options.foreach)
for update in range(1000000):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 4, (8,))).backward()
    optimizer.step()
"""


@pytest.mark.job
def test_a_real_script_is_ended_after_some_updates_and_its_culprit_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "mtrain_trace", "bisect", "--out", "t", "--updates", "3", "--a", ""]
    words += ["--b", "--foreach --decay 0.01", "--", sys.executable, "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "PARTED BY no --decay -> --decay 0.01" in done.stdout
    assert "weight_decay 0 and 0.01" in done.stdout
    assert "1 of 2 differences matter (4 trainings)" in done.stdout
    assert len(reading.read(tmp_path / "t" / "b").updates) == 3
