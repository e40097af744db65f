"""Traces of scripts and run folders of mtrain are compared with one another, in any order and several at once."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.starts import starts_processes

SCRIPTS = Path(__file__).parent / "mixtures"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def done(here: Path, *words: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *words]
    result = subprocess.run(command, cwd=here, env=ENVIRON, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == status, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a plain loop, one of it with a loss that is doubled in update 6, and runs of the same in a session."""
    here = tmp_path_factory.mktemp("mixtures")
    plain = [sys.executable, str(SCRIPTS / "plain.py")]
    done(here, "mtrain_trace", "run", "--out", "plain", "--", *plain, "0.1")
    done(here, "mtrain_trace", "run", "--out", "doubled", "--", *plain, "0.1", "6")
    done(here, "mtrain_trace", "run", "--out", "rate", "--", *plain, "0.2")
    run = ("mtrain", "run", "--backend", "solo", "--nproc-per-node", "1")
    done(here, *run, "-o", "report.trace=state", "--name", "session", str(SCRIPTS / "session.py"))
    bare = here / "runs" / "bare"
    bare.mkdir()
    whole = (here / "runs" / "session" / "metrics.jsonl").read_text().splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key != "trace"} for line in whole]
    (bare / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return here


def compare(folder: Path, *words: str, status: int) -> str:
    return done(folder, "mtrain", "compare", *words, status=status).stdout


@pytest.mark.parametrize("order", [("plain", "runs/session"), ("runs/session", "plain")])
def test_a_loop_of_torch_and_the_same_in_a_session_are_the_same_up_to_rounding(
    folder: Path, order: Sequence[str]
) -> None:
    result = json.loads(compare(folder, *order, "--json", status=0))
    assert result["verdict"] == "same up to rounding"
    assert result["updates"] == 8
    for what in ("loss", "gradient", "weights"):
        largest = max(result["differences"][what])
        print(f"{' and '.join(order)}: {what} {largest:.1e}")
        assert largest < 1e-4
    assert "samples, moments, buffers, targets, gradients" in result["remarks"][0]


def test_what_parts_a_run_from_a_trace_is_named_from_either_side(folder: Path) -> None:
    told = compare(folder, "runs/session", "doubled", status=1)
    assert "DIFFERENT: loss first in update 6" in told
    assert "The loss of B is 2 times that of A" in told
    told = compare(folder, "rate", "runs/session", status=1)
    assert "DIFFERENT: optimizer settings first in update 1" in told
    assert "lr 0.2 and 0.1" in told


def test_several_are_each_compared_with_the_first_and_what_a_run_lacks_is_said(folder: Path) -> None:
    told = compare(folder, "plain", "runs/bare", "runs/session", status=0)
    first, second = told.split("plain and runs/session:")
    assert first.startswith("plain and runs/bare:")
    assert (
        "runs/bare: not seen: samples, weights, moments, buffers (they are recorded with -o report.trace=state)"
        in first
    )
    assert "runs/bare: its spec cannot be read, so settings but the rates are not seen" in first
    assert "not seen: samples, weights" not in second
    assert "weights" in second.split("\n\n")[-1]
    assert told.count("SAME UP TO ROUNDING over 8 updates") == 2


def test_a_run_is_no_trace_for_the_small_command_and_is_told_so(folder: Path) -> None:
    told = done(folder, "mtrain_trace", "compare", "plain", "runs/session", status=2).stderr
    assert "runs/session: is a run folder of mtrain; it is compared by: mtrain compare" in told


def test_options_of_jobs_and_of_recorded_trainings_do_not_mix(folder: Path) -> None:
    told = done(folder, "mtrain", "compare", "plain", "doubled", "--updates", "4", status=2).stderr
    assert "plain doubled --updates: expected folders of trainings that have ended, or --updates and no folder" in told
    assert "--bits is for trainings that have ended" in done(folder, "mtrain", "compare", "--bits", status=2).stderr
