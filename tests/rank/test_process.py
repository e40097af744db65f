"""The files that one rank leaves, and the state from which it starts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from functools import partial

import numpy as np
import pytest

from mtrain.core.checkpoint.store import Checkpoints, progress_of
from mtrain.core.interfaces import Progress, State
from mtrain.errors import Interrupted, ScriptError, UsageError
from mtrain.rank import process, script_mode
from mtrain.rank.records import RANDOM_SHARDS, compare_layers
from mtrain.rank.script import job
from mtrain.rank.script.job import PLAIN_PYTHON, RUNNING, running
from mtrain.rank.spec.assembly import _left_by
from mtrain.system.runfolder import RunFolder
from mtrain.weights.reading import read
from tests.script.in_process import rank_of


def test_an_error_is_left_while_the_backend_is_entered_and_only_once(tmp_path, capfd):
    run = RunFolder(tmp_path)
    leave = process.Leaving(run, 3)
    with pytest.raises(ValueError, match="upside down"), _left_by(leave):
        raise ValueError("upside down")
    left = run.failures / "rank-3.json"
    content = left.read_text()
    error = ValueError("later")
    leave(error)
    assert json.loads(left.read_text())["message"] == "later"
    left.write_text(content)
    leave(error)
    assert left.read_text() == content
    assert capfd.readouterr().err.count("upside down") == 2  # the traceback shows the line too


def test_an_error_that_cannot_be_written_is_still_printed(tmp_path, capfd):
    (tmp_path / "failures").write_text("a file where the folder should be")
    process.Leaving(RunFolder(tmp_path), 0)(Interrupted("ended from outside"))
    assert "ended from outside" in capfd.readouterr().err


def test_start_weights_can_be_those_of_a_checkpoint_the_averaged_ones_where_there_are_any(tmp_path):
    store = Checkpoints(tmp_path, keep_last=1, keep_best=0, asynchronous=False)
    state = State(weights={"a": np.zeros(2), "n": np.array(3)}, ema={"a": np.ones(2)})
    store.save(state, Progress(update=4, samples=8), score=None, spec={}, extra={})
    weights = read(tmp_path / "step-00000004").arrays
    assert {name: array.tolist() for name, array in weights.items()} == {"a": [1, 1], "n": 3}
    assert progress_of(tmp_path / "step-00000004") == Progress(update=4, samples=8)


def test_signals_of_one_request_to_save_count_once_and_a_later_one_again():
    now = [100.0]
    request = process.SaveRequest(clock=lambda: now[0])
    assert not request()
    with request.listening():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert request()
        assert request(), "until it is served"
        request.mark_served()
        now[0] += 1.0
        os.kill(os.getpid(), signal.SIGUSR1)  # what a starter passes on
        assert not request()
        now[0] += 60.0
        assert not request(), "the signal passed on was no second request"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request()


def test_a_handler_that_a_program_has_for_sigusr1_is_called_too_and_restored():
    calls = []
    former = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        request = process.SaveRequest()
        with request.listening():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(calls) == 2
    finally:
        signal.signal(signal.SIGUSR1, former)


SCRIPT = """
import os, signal, sys, time
from mtrain.rank import process, script_mode
stop = process.StopRequest()
stop.listen()
stop.leave_to_script()
exec(sys.argv[1])
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)  # from a starter, since another rank has ended
    time.sleep(0.05)
    print("saved")
"""


@pytest.mark.job
@pytest.mark.parametrize(
    ("own", "said"),
    [("", "saved\n"), ("signal.signal(signal.SIGTERM, lambda *_: print('own'))", "own\nsaved\n")],
    ids=["no handler", "a handler of its own"],
)
def test_a_script_that_is_interrupted_may_save_though_its_starter_ends_the_ranks(own, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT, own], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (said, 0), done.stderr


@pytest.mark.parametrize(
    ("text", "knows"),
    [
        ("import mtrain", True),
        ("import os, mtrain", True),
        ("    from mtrain_tensorflow.keras import Job", True),
        ("# start me with `mtrain run`", False),
        ("print('mtrain')", False),
        ("import mtrainer", False),
    ],
)
def test_a_script_knows_mtrain_by_its_imports_and_not_by_a_remark(tmp_path, text, knows):
    """A script that only names it would never hear a request to end."""
    (tmp_path / "a.py").write_text(f"import sys\n{text}\n")
    assert script_mode.knows_mtrain(tmp_path / "a.py") == knows


@pytest.mark.job
def test_a_rank_blocks_sigusr1_so_that_it_interrupts_nothing_and_ends_no_child():
    script = """
        import os, signal, subprocess, sys
        from mtrain.rank.process import StopRequest
        stop = StopRequest()
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        child = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"]
        print(subprocess.run(child, capture_output=True, text=True).stdout.strip(), stop.save(), stop())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "alive True False"


def test_a_thread_that_waits_for_the_interpreter_gets_it_before_a_rank_ends(tmp_path, monkeypatch):
    order = []
    for name in ("_log_to", "end_with_parent"):
        monkeypatch.setattr(process, name, lambda *_: None)
    monkeypatch.setattr(process.attempts, "join", lambda *_, **__: None)
    monkeypatch.setattr(process.stacks, "register", lambda _: None)  # for the whole process of the tests it would stay
    monkeypatch.setattr(process.StopRequest, "listen", lambda stop: None)
    monkeypatch.setattr(process.time, "sleep", lambda seconds: order.append("sleeps"))

    def fail(stop, leave):
        order.append("fails")
        raise UsageError("wrong")

    run = partial(process.run, run_folder=RunFolder(tmp_path), environ={"RANK": "0"})
    assert run(lambda stop, leave: order.append("works")) == 0
    assert run(fail) == 2
    assert order == ["works", "sleeps", "fails", "sleeps"]


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(1 / 0)", "import sys; sys.exit('no')"])
def test_an_error_of_a_script_is_left_without_the_frames_of_mtrain(tmp_path, monkeypatch, text):
    left = []

    def leave(error):  # frames are added again as the error goes on
        left.append(traceback.extract_tb(error.__traceback__))

    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "r.py"
    script.write_text(f"import mtrain\n{text}\n")
    with (
        rank_of(tmp_path / "run", "backend.name=solo", leave=leave),
        pytest.raises((ZeroDivisionError, SystemExit)),
    ):
        script_mode.run_script(RUNNING.get().job, script, (), digest=None)
    ((first, *_),) = left
    assert (first.filename, first.lineno) == (str(script), 2)


def test_a_session_in_a_thread_of_its_own_is_refused_in_a_rank(monkeypatch):
    assert running() is PLAIN_PYTHON
    monkeypatch.setattr(job, "STARTED", [object()])
    with pytest.raises(ScriptError, match="called in a thread of its own"):
        running()


@pytest.mark.parametrize(
    ("extra", "is_told"), [(None, False), ({}, False), ({RANDOM_SHARDS: 4}, False), ({RANDOM_SHARDS: 3}, True)]
)
def test_other_random_numbers_than_before_are_told_when_a_job_goes_on(extra, is_told):
    told = compare_layers(extra, 4)
    assert bool(told) == ("in 3 parts" in told) == is_told
