"""``benchmarks/accuracy.py``: turns, results that go on where they were cut off, and the figures of the test."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.accuracy import Comparison, read_pair, read_results, report, turns

ROOT = Path(__file__).parents[1]
TRAIN = "import pathlib, sys; pathlib.Path(sys.argv[1], 'w-1').write_text(sys.argv[2])"
JUDGE = (
    "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1], 'run'); folder.mkdir(parents=True); "
    "value = float(pathlib.Path(sys.argv[2]).read_text()); "
    "(folder / 'metrics.jsonl').write_text(json.dumps({'kind': 'end', 'metrics': {'AP50': value}}) + chr(10))"
)


@pytest.fixture
def pair(tmp_path) -> Path:
    """A pair whose sides write a number as their weights, and whose judge reads it: 0.5 + seed, and 0.6 + seed."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "judge.py").write_text(JUDGE)
    sides = {
        name: {
            "train": ["{python}", str(tmp_path / "train.py"), "{folder}", f"{value}{{seed}}"],
            "judged": ["{folder}/w-*"],
        }
        for name, value in (("ours", "0.5"), ("theirs", "0.6"))
    }
    text = {
        "metrics": ["AP50"], "seeds": 3, "level": 0.05, "difference": 0.03, "values": {"data": None}, "sides": sides,
        "judge": ["{python}", str(tmp_path / "judge.py"), "{folder}"],
    }  # fmt: skip
    (tmp_path / "pair.yml").write_text(yaml.safe_dump(text))
    return tmp_path / "pair.yml"


def ran(pair: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "benchmarks/accuracy.py", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.job
def test_sides_take_turns_and_a_study_that_was_cut_off_goes_on(pair, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"side": "theirs", "seed": 1, "metrics": {"AP50": 0.9}}) + "\n")
    whole = read_pair(pair, {"data": "x"})
    assert [(seed, side.name) for seed, side in turns(whole, 3, read_results(results))] == [
        (0, "ours"), (0, "theirs"), (1, "ours"), (2, "ours"), (2, "theirs"),
    ]  # fmt: skip
    assert [(seed, side.name) for seed, side in turns(whole, 2, [])][2:] == [(1, "theirs"), (1, "ours")]
    outcome = ran(pair, "run", str(pair), str(results), "--set", "data=x", "--seeds", "2")
    assert outcome.returncode == 0, outcome.stderr
    found = {(row["side"], row["seed"]): row["metrics"]["AP50"] for row in read_results(results)}
    assert found == {("theirs", 1): 0.9, ("ours", 0): 0.50, ("theirs", 0): 0.60, ("ours", 1): 0.51}


@pytest.mark.job
def test_a_value_that_is_missing_and_a_training_that_fails_end_the_study_in_words(pair, tmp_path):
    assert "needs data: give --set data=..." in ran(pair, "report", str(pair), "none.jsonl").stderr
    text = yaml.safe_load(pair.read_text())
    text["sides"]["ours"]["train"] = ["{python}", "-c", "raise SystemExit('no data')"]
    pair.write_text(yaml.safe_dump(text))
    outcome = ran(pair, "run", str(pair), str(tmp_path / "r.jsonl"), "--set", "data=x", "--seeds", "1")
    assert outcome.returncode == 1
    assert "ended with 1" in outcome.stderr
    assert "no data" in outcome.stderr


def test_the_test_is_welch_s_and_asks_whether_the_first_is_worse():
    # Welch's t is (0.70 - 0.76) / sqrt(0.0025 / 3 + 0.0001 / 3) = -2.038, with 2.16 degrees of freedom; one-sided.
    compared = Comparison(np.array([0.65, 0.70, 0.75]), np.array([0.75, 0.76, 0.77]), 0.05)
    assert compared.difference() == pytest.approx(-0.06)
    assert compared.p() == pytest.approx(0.0841, abs=2e-3)
    assert Comparison(compared.theirs, compared.ours, 0.05).p() == pytest.approx(1 - compared.p())


def test_the_power_is_the_share_of_simulated_studies_that_find_the_difference():
    rng = np.random.Generator(np.random.PCG64(1))
    ours, theirs = rng.normal(0.5, 0.02, 8), rng.normal(0.5, 0.03, 8)
    compared = Comparison(ours, theirs, 0.05)
    spreads = ours.std(ddof=1), theirs.std(ddof=1)
    found = [
        Comparison(rng.normal(0.47, spreads[0], 8), rng.normal(0.5, spreads[1], 8), 0.05).p() < 0.05
        for _ in range(1500)
    ]
    assert compared.power(0.03) == pytest.approx(np.mean(found), abs=0.04)
    assert compared.power(compared.detectable()) == pytest.approx(0.8, abs=1e-6)
    needed = compared.seeds_for(0.02)
    assert compared.power(0.02, seeds=needed) >= 0.8 > compared.power(0.02, seeds=needed - 1)


def test_the_report_has_the_figures_of_each_side(pair):
    rows = [
        {"side": side, "seed": i, "metrics": {"AP50": value + i / 100}}
        for side, value in (("ours", 0.4), ("theirs", 0.5))
        for i in range(3)
    ]
    line = report(read_pair(pair, {"data": "x"}), rows).splitlines()[-1]
    assert line.startswith("| AP50 | 0.410 (0.010), 3 | 0.510 (0.010), 3 | -0.100 | 0.000 |")
