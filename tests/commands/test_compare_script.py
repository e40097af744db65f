"""``mtrain compare --script`` with real jobs: scripts that train wrongly on one backend are found, and the others agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.commands import main
from tests.script.runs import SCRIPTS

PLANTED = SCRIPTS / "planted.py"


def compare(folder: Path, script: Path, backends: str, *more: str, status: int) -> tuple[dict, str, str]:
    """(compare.json, what was printed, what was told on the way)."""
    command = [sys.executable, "-m", "mtrain", "compare", "--script", str(script), "--backends", backends]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*command, "--out", str(folder), *more],
        cwd=folder.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == status, process.stdout + process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    assert (folder / "compare.html").read_text().startswith("<!doctype html>")
    return json.loads((folder / "compare.json").read_text()), process.stdout, process.stderr


def rows_of(comparison: dict) -> dict[str, dict]:
    return {row["label"]: row for row in comparison["backends"]}


def first_difference(row: dict) -> tuple[int, str]:
    against = row["against_reference"]
    return against["first_update"], against["first_in"][0]


@pytest.mark.job
def test_the_backend_on_which_a_script_trains_wrongly_is_found_with_the_update_and_the_quantity(tmp_path):
    faults = ["sample=horovod", "loss=solo", "weight=solo-device=cpu", "error=solo-tf32=true"]
    actual, printed, told = compare(
        tmp_path / "out", PLANTED, "ddp,horovod,solo,solo:device=cpu,solo:tf32=true", "--rounds", "0", "--updates", "4",
        "--", "--precision", "fp64", "--faults", *faults, status=1,
    )  # fmt: skip
    rows = rows_of(actual)
    assert (actual["updates"], actual["reference"]) == (4, "ddp")
    labels = ("horovod", "solo", "solo:device=cpu")
    assert [first_difference(rows[label]) for label in labels] == [(1, "samples"), (1, "loss"), (2, "weights")]
    assert [rows[label]["verdict"] for label in labels] == ["differs", "differs", "within float32"]
    assert "the loss of solo is 2 times that of ddp" in rows["solo"]["against_reference"]["causes"][0]
    assert "The first difference is in update 3, in weights" in printed
    failed = rows["solo:tf32=true"]
    assert failed["verdict"] == "failed"
    assert "RuntimeError: this backend is not liked here" in failed["reason"]
    assert "solo:tf32=true: failed: " in told


@pytest.mark.slow
def test_faults_of_loops_with_several_models_are_named(tmp_path):
    said = {
        "left": "the gradient of another model's loss is left in it",
        "given": "the loss of model D is larger by that of model G",
        "target": "in update 1 it trains model slow, which the reference never trains",
        "average": "model slow, which no update trains, is not: it follows another model",
        "plateau": "lr 0.0125 and 0.1 (group 1 of D, ",
        "skip": "optimizer.skip: ranks 1 of 2 have left out update 3, which the others have made",
    }
    labels = {fault: f"ddp:checkpoint.keep_last={number}" for number, fault in enumerate(said, 3)}
    faults = [f"{fault}={label.replace(':', '-')}" for fault, label in labels.items()]
    actual, _, _ = compare(
        tmp_path / "out", SCRIPTS / "planted_loops.py", ",".join(["ddp", *labels.values()]), "--rounds", "0", "--", "--faults",
        *faults, status=1,
    )  # fmt: skip
    rows = rows_of(actual)
    for fault, label in labels.items():
        told = rows[label]["reason"] or "; ".join(rows[label]["against_reference"]["causes"])
        assert said[fault] in told, fault
        assert rows[label]["verdict"] == {"skip": "refused", "left": "ranks differ"}.get(fault, "differs"), fault


@pytest.mark.slow
def test_scripts_that_end_early_or_train_nothing_have_a_row_that_says_so(tmp_path):
    actual, printed, _ = compare(
        tmp_path / "out", PLANTED, "solo,solo:device=cpu,solo:tf32=true", "--ranks", "1", "--rounds", "0",
        "--updates", "5", "--", "--precision", "fp64", "--faults", "ends=solo-device=cpu", "idle=solo-tf32=true",
        status=1,
    )  # fmt: skip
    row = rows_of(actual)["solo:device=cpu"]
    assert row["verdict"] == "differs"
    assert row["against_reference"]["beyond_profile"] == ["it ends after 3 updates, the reference after 5"]
    assert "solo:tf32=true failed: planted.py ended without a loop over session.batches(...)" in printed


@pytest.mark.smoke
@pytest.mark.job
def test_a_script_without_a_session_has_nothing_to_compare(tmp_path):
    script = tmp_path / "other.py"
    script.write_text("print('I train elsewhere')\n")
    _, printed, _ = compare(tmp_path / "out", script, "solo,ddp", "--ranks", "1", status=3)
    assert "solo failed: other.py ended without a loop over session.batches(...)" in printed


@pytest.mark.slow
def test_one_rank_two_and_every_backend_train_a_script_bit_for_bit_alike(tmp_path):
    actual, printed, _ = compare(
        tmp_path / "out", PLANTED, "ddp,horovod,deepspeed:stage=1,deepspeed:stage=3,solo", "--updates", "100", status=0
    )
    rows = rows_of(actual)
    assert actual["updates"] == 8, "the script ends after four epochs of two updates"
    assert actual["same_bits"] == [["ddp", "horovod", "deepspeed:stage=1", "deepspeed:stage=3", "solo"]]
    assert all(row["repeats"] for row in rows.values())
    assert rows["solo"]["notes"] == ["one rank, with 2 shards of each micro batch in turn: the same ones as on 2 ranks"]
    assert rows["ddp"]["speed"]["sent_bytes"] > 0
    assert len(rows["ddp"]["speed"]["communication_shares"]) == 2
    assert actual["facts"]["optimizer"] == "sgd, learning rate 0.1, cosine"
    assert "bit for bit, in all 8 updates" in printed


@pytest.mark.slow
def test_rounding_on_three_ranks_is_told_from_faults_by_float64_and_a_nudged_job(tmp_path):
    actual, _, told = compare(
        tmp_path / "out", PLANTED, "ddp,solo", "--ranks", "3", "--updates", "6", "--rounds", "0",
        "--", "--accumulate", "2", status=0,
    )  # fmt: skip
    assert rows_of(actual)["solo"]["verdict"] == "within float32"
    assert max(actual["float64"]["nudged"]["loss"]) > 0
    assert "ddp: nudged job of 6 updates" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "nowhere.py"], "nowhere.py: No such file or directory; give the Python script"),
        (["--script", "."], "is a folder"),
        (["--script", "broken.py"], "broken.py:1: is not valid Python"),
        (["--", "--epochs", "3"], "arguments for a script, but no script; name it with --script FILE"),
        (
            ["--script", "good.py", "more"],
            "more --script --backends: expected folders of trainings that have ended, or --script and no folder",
        ),
        (["--script", "good.py", "-b", "ddp,ddp:train.updates=3"], "a comparison sets train.updates itself"),
    ],
)
def test_wrong_use_of_scripts_is_refused_before_anything_starts(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def\n")
    Path("good.py").write_text("import mtrain\n")
    assert main(["compare", "--backends", "ddp,solo", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert not (tmp_path / "runs").exists()


NORMALISED = """
import sys
sys.path.insert(0, {scripts!r})
import torch
import mtrain
from points import Points


with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)),
        optimizer=mtrain.SGD(learning_rate=0.1), accumulate=2, precision="fp64",
    )
    for inputs, targets in session.batches(Points(64, 0), global_batch=16, epochs=2):
        optimizer.update(torch.nn.functional.cross_entropy(model(inputs), targets))
"""


@pytest.mark.slow
def test_a_script_with_batchnorm_agrees_on_one_rank_and_on_two(tmp_path):
    script = tmp_path / "normalised.py"
    script.write_text(NORMALISED.format(scripts=str(SCRIPTS)))
    actual, _, _ = compare(tmp_path / "out", script, "ddp,solo", "--rounds", "0", "--updates", "4", status=0)
    assert rows_of(actual)["solo"]["ranks"] == 1


@pytest.mark.slow
def test_statistics_over_all_ranks_of_a_script_are_not_compared_with_one_process(tmp_path):
    script = tmp_path / "synchronised.py"
    text = NORMALISED.format(scripts=str(SCRIPTS)).replace("accumulate=2", "sync_batchnorm=True")
    script.write_text(text)
    actual, _, _ = compare(tmp_path / "out", script, "ddp,solo", "--rounds", "0", "--updates", "2", status=3)
    row = rows_of(actual)["solo"]
    assert row["verdict"] not in ("differs", "inexact")
    assert "sync_batchnorm" in row["reason"]
    assert "compare without this backend" in row["reason"]
