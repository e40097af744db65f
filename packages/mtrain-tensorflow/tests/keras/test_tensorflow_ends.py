"""How scripts of Horovod with TensorFlow end, are asked to save or to end, and go on, under mtrain run and under plain Python."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.keras import jobs
from tests.keras.jobs import PYTHON, difference, environment, needs_tensorflow, weights

from mtrain.core.checkpoint import store

pytestmark = [needs_tensorflow, pytest.mark.job]
SMALL = Path(__file__).with_name("small.py")
ENDS = """
import os, sys, time
if sys.argv[0] == "-":  # what a script imports decides which framework it is of; nothing here needs it
    import tensorflow
if os.environ["HOROVOD_RANK"] == "1":
    print("begins", flush=True)
    exec(sys.argv[1])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("sys.exit(3)", ["rank 1 on", "failed first: SystemExit: 3"]),
        ("raise ValueError('a bad number')", ["rank 1 on", "failed first: ValueError: a bad number"]),
        ("os._exit(3)", ["last lines of", "begins", "error: rank 1 ended with exit code 3"]),
    ],
    ids=["exit", "exception", "gone"],
)
def test_the_rank_that_ends_a_job_is_named_with_what_it_did(statement, words, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    result = jobs.run(tmp_path, tmp_path / "ends.py", 2, arguments=(statement,))
    assert result.returncode == 1
    assert [word for word in words if word not in result.stderr + result.stdout] == []
    assert "script_mode.py" not in result.stderr, "a traceback begins with the script"


def updates(here: Path, name: str) -> list[int]:
    """Numbers of the updates of a run that were made so far."""
    file = here / "runs" / name / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return [row["update"] for row in rows if row["kind"] == "update"]


def made(here: Path) -> int:
    """Number of the updates that the small script's process has made; records of them are written later."""
    file = here / "made"
    return int(file.read_text() or 0) if file.exists() else 0


def wait_for(condition, *, what: str) -> None:
    limit = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def saved(here: Path) -> store.Saved:
    return store.load(store.newest(here / "runs/a/checkpoints"))


@pytest.mark.slow
def test_a_job_saves_at_sigusr1_and_with_if_any_a_killed_one_goes_on_to_the_same_bits_with_dropout(tmp_path):
    rarely = ("-o", "checkpoint.every_updates=1000", "-o", "checkpoint.every_epochs=1000")
    words, arguments = ("--name", "a", "--resume", "if-any", *rarely), ("saved_numbers",)
    first = jobs.run(tmp_path / "whole", SMALL, 1, *words, arguments=arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    here = tmp_path / "killed"
    job = jobs.started(here, SMALL, 1, *words, arguments=arguments, until="runs/a/metrics.jsonl")
    wait_for(lambda: made(here) >= 11, what="update 11")
    assert not list(here.glob("runs/a/checkpoints/step-*"))
    job.send_signal(signal.SIGUSR1)
    wait_for(lambda: list(here.glob("runs/a/checkpoints/step-*/MANIFEST.json")), what="a checkpoint")
    before = made(here)
    wait_for(lambda: made(here) > before, what="another update")
    jobs.kill_all(job)
    assert not (here / "weights.npz").exists()
    assert 11 <= saved(here).progress.update < 30
    again = jobs.run(here, SMALL, 1, *words, arguments=arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert difference(weights(tmp_path / "whole"), weights(here)) == 0.0
    assert sorted(set(updates(here, "a"))) == list(range(30))
    assert not [each for each in jobs.records(here, "a") if "other random numbers" in str(each.get("message"))]


def plain(here: Path, *words: str) -> "subprocess.Popen[str]":
    """Start the small script by plain Python in a folder, which is made."""
    here.mkdir(exist_ok=True)
    return subprocess.Popen(
        [str(PYTHON), str(SMALL), *words], cwd=here, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "code", "reason", "last"),
    [("exits", 3, "failed", 10), ("raises", 1, "failed", None), ("gone", 3, None, 10), ("ends", 0, "done", 30)],
)
def test_plain_python_keeps_the_exit_code_of_the_script_and_the_summary_says_how_it_ended(
    word, code, reason, last, tmp_path
):
    job = plain(tmp_path, word)
    _, told = job.communicate(timeout=300)
    assert job.returncode == code, told
    assert ("ValueError: a bad number" in told) == (word == "raises")
    folder = tmp_path / "runs/small"
    summary = folder / "summary.json"
    assert summary.exists() == (reason is not None)
    if reason is not None:
        assert json.loads(summary.read_text())["reason"] == reason
    newest = store.newest(folder / "checkpoints")
    assert (None if newest is None else store.load(newest).progress.update) == last


@pytest.mark.slow
def test_a_script_of_plain_python_that_was_asked_to_end_goes_on_under_mtrain_as_it_says(tmp_path):
    """Its dropout is of the kind whose counters TensorFlow keeps to itself, which the resumed job says."""
    job = plain(tmp_path)
    folder = tmp_path / "runs/small"
    wait_for(lambda: made(tmp_path) >= 4, what="update 4")
    job.send_signal(signal.SIGTERM)
    _, told = job.communicate(timeout=120)
    assert job.returncode == 143, told
    assert "mtrain run --backend horovod --nproc-per-node 1 --resume" in told
    result = jobs.run(tmp_path, SMALL, 1, "--resume", str(folder), arguments=())
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(set(updates(tmp_path, folder.name))) == list(range(30))
    warned = [each["message"] for each in jobs.records(tmp_path, folder.name) if "message" in each]
    assert [message for message in warned if message.startswith("dropout: draws other random numbers")]


@pytest.mark.slow
def test_doctor_says_for_which_framework_horovod_is_there_and_that_torch_is_for_others(tmp_path):
    line = [sys.executable, "-m", "mtrain", "doctor", "--quick", "--json", "-b", "horovod"]
    done = subprocess.run(
        [*line, "-o", f"backend.python={PYTHON}"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (found["torch"]["state"], found["horovod"]["state"], found["tensorflow"]["state"]) == ("absent", "ok", "ok")
    assert "scripts of horovod with torch, cannot run without it" in found["torch"]["text"]
    assert not found["torch"]["remedy"], "nothing is missing for scripts with TensorFlow"
    assert "for tensorflow 2.15" in found["horovod"]["text"]
