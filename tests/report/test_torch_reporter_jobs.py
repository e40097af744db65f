"""Reporters in real jobs: of a spec and of a script, on one rank and on several."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_model.runs import QUIET, command, refused

pytestmark = pytest.mark.job

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("-o", "train.epochs=2", "cluster.threads=1", "--backend", "ddp", "--nproc-per-node", "2")


def test_the_example_reports_on_every_rank_and_one_that_fails_harms_nothing(tmp_path):
    for name in ("reporters", "own-model"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    (tmp_path / "bad.py").write_text("def fails(record):\n    raise KeyError('lost')\n")
    words = ("train", "-c", "reporters/spec.yml", "--name", "a", *SHORT, *QUIET)
    result = command(tmp_path, *words, "-o", "report.reporters={./bad.py:fails: true}")
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "a"
    updates = json.loads((run / "summary.json").read_text())["updates"]
    for rank in (0, 1):
        assert (run / f"slow-{rank}.txt").read_text().splitlines()[-1] == f"done after {updates} updates"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    warnings = [record["message"] for record in records if record["kind"] == "warning"]
    assert [message.partition("bad.py:")[2] for message in warnings] == [
        "fails' has failed and is switched off: KeyError: 'lost'"
    ]
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + 2


@pytest.mark.slow
def test_a_fatal_reporter_ends_the_job_and_the_others_learn_why(tmp_path):
    shutil.copytree(EXAMPLES / "own-model", tmp_path / "own-model")
    (tmp_path / "watch.py").write_text(
        "class Fatal:\n"
        "    fatal = True\n"
        "    def update(self, record):\n"
        "        if record['update'] == 3:\n"
        "            raise ValueError('too warm')\n"
        "class Last:\n"
        "    def __init__(self, run):\n"
        "        self.file = run.folder / 'last.txt'\n"
        "    def failure(self, record):\n"
        "        self.file.write_text(record['error'])\n"
    )
    reporters = "report.reporters={./watch.py:Fatal: true, ./watch.py:Last: true}"
    words = ("train", "-c", "own-model/own.yml", "--name", "a", "--backend", "solo", *QUIET, "-o", reporters)
    result = command(tmp_path, *words)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Fatal' has failed: ValueError: too warm" in result.stdout + result.stderr
    assert (tmp_path / "runs" / "a" / "last.txt").read_text().endswith("has failed: ValueError: too warm")


def test_a_plan_refuses_a_reporter_that_does_not_exist_and_options_that_it_does_not_take(tmp_path):
    (tmp_path / "watch.py").write_text("class Watch:\n    def __init__(self, run, limit=3):\n        pass\n")
    words = ("plan", "-c", "digits", "-o")
    message = refused(tmp_path, *words, "report.reporters={./watch.py:Wach: true}")
    assert "defines no 'Wach'" in message
    message = refused(tmp_path, *words, "report.reporters={./watch.py:Watch: {limits: 3}}")
    assert "watch.py:Watch.limits: Watch takes no such option; did you mean 'limit'?" in message


SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import train
import mtrain

class Watch:
    every_rank = True
    updates = 0
    def update(self, record):
        self.updates += 1
    def end(self, record):
        print("watched", self.updates, record["reason"], flush=True)

notes = []
with mtrain.session(reporters=[Watch(), lambda record: notes.append(record["kind"])]) as session:
    model, optimizer = session.prepare(train.network, optimizer=mtrain.SGD(learning_rate=0.1))
    for images, classes in session.batches(train.Digits(training=True), global_batch=48, updates=5):
        optimizer.update(train.nn.functional.cross_entropy(model(images), classes))
    session.print("a note")
if session.rank == 0:
    print("kinds", sorted(set(notes)), flush=True)
"""


@pytest.mark.slow
def test_the_reporters_of_a_script_are_called_by_plain_python_too(tmp_path):
    script = tmp_path / "watched.py"
    script.write_text(SCRIPT.format(examples=str(EXAMPLES / "own-script")))
    line = [sys.executable, str(script)]
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert "watched 5 done" in result.stdout
    assert "kinds ['checkpoint', 'end', 'note', 'start', 'update']" in result.stdout
    assert "a note" in result.stdout, "the display of plain Python shows it"
