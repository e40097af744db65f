"""What is decided without TensorFlow: whose script it is, which framework, what is refused, what the ranks of a trace disagree in."""

import ast
import json
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mtrain_tensorflow.keras
from mtrain.core.interfaces import Progress
from mtrain.jobs.run.script_job import imports_tensorflow
from mtrain.rank.process import StopRequest
from mtrain.rank.script_mode import knows_mtrain
from mtrain_trace import rank_checks, reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import tensorflow as tf", True),
        ("from tensorflow import keras", True),
        ("import horovod.tensorflow.keras as hvd", True),
        ("from horovod import tensorflow as hvd", True),
        ("import horovod.keras as hvd", True),
        ("def main():\n    import tensorflow.compat.v1 as tf", True),
        ("import torch\nimport tensorflow as tf", False),
        ("import horovod.torch as hvd\nimport tensorflow", False),
        ("import keras", False),  # of Keras 3, whose backend may be torch
        ("import numpy", False),
    ],
)
def test_a_script_says_by_its_imports_whether_it_is_of_tensorflow(text, expected):
    assert imports_tensorflow(ast.parse(text)) is expected


def run_mtrain(here, *words):
    return subprocess.run(
        [sys.executable, "-m", "mtrain", *words], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.job
def test_a_script_of_tensorflow_is_refused_where_tensorflow_is_missing(tmp_path):
    (tmp_path / "train_tf.py").write_text("import tensorflow as tf\n")
    result = run_mtrain(tmp_path, "run", "--backend", "horovod", "train_tf.py")
    assert result.returncode == 2
    assert "backend.name: horovod runs on tensorflow, which is not installed" in result.stderr
    assert "-o backend.python=" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.job
def test_a_spec_is_refused_on_tensorflow(tmp_path):
    words = ("train", "-c", "digits", "--backend", "horovod", "-o", "backend.options.framework=tensorflow", "--dry-run")
    result = run_mtrain(tmp_path, *words)
    assert result.returncode == 2
    assert "backend.options.framework: tensorflow given, on which mtrain has no models" in result.stderr


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--build-horovod", "--with", "jax"), "--with jax given; expected torch, tensorflow"),
        (("--build-horovod", "--with", "tensorflow"), "has no TensorFlow, against which Horovod is built"),
        (("--with", "tensorflow"), "--with tensorflow: given without --build-horovod"),
    ],
)
def test_doctor_refuses_to_build_horovod_for_what_is_not_there(words, message, tmp_path):
    result = run_mtrain(tmp_path, "doctor", *words)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.job
def test_signals_are_those_of_a_script_that_does_not_know_mtrain(tmp_path):
    for text, knows in (("import torch", False), ("import mtrain", True), ("from mtrain import keras", True)):
        (tmp_path / "script.py").write_text(text)
        assert knows_mtrain(tmp_path / "script.py") is knows
    program = """
import os, signal, sys
from mtrain.rank.process import StopRequest
stop = StopRequest()
stop.listen()
stop.leave_to_script()
os.kill(os.getpid(), signal.SIGUSR1)
print("goes on", flush=True)
if sys.argv[1] == "back":
    stop.take_back()
os.kill(os.getpid(), signal.SIGTERM)
print("stop", stop(), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, "left"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "goes on\n")
    asked = subprocess.run(
        [sys.executable, "-c", program, "back"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (asked.returncode, asked.stdout) == (0, "goes on\nstop True\n")
    assert StopRequest()() is False


def trace(folder, *, starts=("aa", "aa"), saves=((), ()), metrics=(0.5, 0.5), states=("r0", "r1"), updates=2):
    """Write the trace of a training with Keras of two ranks, and read it."""
    for rank in range(len(starts)):
        place = folder / f"rank-{rank:05d}-host-1"
        place.mkdir(parents=True)
        optimizer = {
            "rule": "Adam",
            "groups": [["w"]],
            "shapes": {"w": [1]},
            "dtypes": ["float64"],
            "sharded": False,
            "unseen": [],
        }
        facts = {"rank": rank, "ranks": len(starts), "framework": "tensorflow", "dropouts": 1}
        (place / "process.json").write_text(
            json.dumps({**facts, "optimizers": [optimizer], "saves": list(saves[rank])})
        )
        row = [starts[rank], 1.0, [0.0] * 16]
        (place / "arrays.jsonl").write_text(json.dumps({"update": 0, "optimizer": 0, "weights": {"w": row}}) + "\n")
        (place / "epochs.jsonl").write_text(json.dumps({"epoch": 0, "logs": {"accuracy": metrics[rank]}}) + "\n")
        micro = {"loss": 1.0, "samples": ["1"], "targets": [], "modes": None, "autocast": None}
        record = {"optimizer": 0, "rates": [{"lr": 0.1}], "steps": None, "rng": states[rank], "clip": None}
        lines = [
            json.dumps({"update": n + 1, **record, "weights_changed_outside": False, "micro_batches": [micro]})
            for n in range(updates)
        ]
        (place / "updates.jsonl").write_text("\n".join(lines) + "\n")
    return reading.read(folder)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({}, None),
        ({"starts": ("aa", "bb")}, "ranks [1] begin with other weights than rank 0"),
        ({"saves": (("x.h5",), ("x.h5",))}, "2 ranks write x.h5"),
        ({"metrics": (0.5, 0.6)}, "other metrics after epoch 1 (accuracy: 0.5, 0.6)"),
        ({"states": ("r", "r")}, "all ranks draw the same random numbers"),
    ],
)
def test_what_the_ranks_of_one_training_must_agree_on_is_named(fault, words, tmp_path):
    found = rank_checks.findings(trace(tmp_path / "t", **fault))
    assert (found == []) if words is None else (len(found) == 1 and words in found[0]), found


def test_steps_that_are_not_divided_by_the_ranks_are_named(tmp_path):
    alone = trace(tmp_path / "a", starts=("aa",), updates=2)
    alone.updates[0].samples.update(["1"])  # as many samples an update as two ranks have
    both = trace(tmp_path / "b", updates=4)
    assert "not divided by the number of ranks" in rank_checks.length(alone, both)[0]
    assert rank_checks.length(both, both) == []


class Loop:
    """Notes what a loop of one's own tells its job."""

    def __init__(self, *, update: int = 0, position: int = 0, epoch: int = 0) -> None:
        self.progress = Progress(update=update, position=position, epoch=epoch)
        self.ended: list[bool] = []

    def report_update(self, losses, *, position, ended, place):
        self.ended.append(ended)
        done = replace(self.progress, update=self.progress.update + 1)
        self.progress = replace(done, position=0 if ended else position, epoch=done.epoch + ended)


def trained(loop, **lengths):
    """Return the batches that a loop was given, with one update for each."""
    lengths = {"updates": None, "updates_per_epoch": None} | lengths
    attached, seen = mtrain_tensorflow.keras.Attached(loop, **lengths), []
    for batch in attached.batches(range(8)):
        seen.append(batch)
        attached.step(loss=0.5)
    return seen


def test_a_resumed_loop_gets_the_batches_after_those_of_before_and_no_more_than_its_updates():
    assert trained(Loop()) == list(range(8))
    assert trained(Loop(update=3)) == [3, 4, 5, 6, 7]
    assert trained(Loop(update=3), updates=5) == [3, 4]
    assert trained(Loop(update=5), updates=5) == []


def test_a_loop_counts_its_epochs_from_the_updates_of_one():
    loop = Loop(update=4, position=1, epoch=1)
    trained(loop, updates=8, updates_per_epoch=3)
    assert loop.ended == [False, True, False, False]
    assert (loop.progress.epoch, loop.progress.position) == (2, 2)


@pytest.mark.parametrize(
    ("size", "is_initialized", "kind"), [(2, True, "ranks"), (1, True, "alone"), (2, False, "alone")]
)
def test_a_script_is_joined_to_the_ranks_of_horovod_where_there_are_several(size, is_initialized, kind, monkeypatch):
    parts = SimpleNamespace(TensorflowCollective=lambda hvd: "ranks", Alone=lambda: "alone", device=lambda: "cpu")
    horovod = SimpleNamespace(is_initialized=lambda: is_initialized, size=lambda: size)
    monkeypatch.setattr(mtrain_tensorflow.keras, "_part", lambda name: parts)
    monkeypatch.setattr(mtrain_tensorflow.keras, "KerasJob", lambda collective, device: collective)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    assert mtrain_tensorflow.keras._join_job() == kind
