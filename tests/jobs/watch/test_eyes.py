"""The process that watches a host sees a rank that is stopped, asks it where it is, and still hears what else happens."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.jobs.watch import eyes, looks
from mtrain.jobs.watch.hang_log import HangLog
from mtrain.system.runfolder import RunFolder

RANKS = Path(__file__).parents[2] / "launchers" / "ranks.py"


def until(command: HostCommand, kind: str, condition=lambda event: True):
    deadline = time.monotonic() + 120.0
    while True:
        for event in command.events():
            if event["event"] == kind and condition(event):
                return event
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.job
def test_a_real_rank_that_is_stopped_is_seen_and_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(looks, "INTERVAL_S", 0.2)
    run = RunFolder(tmp_path)
    run.make()
    orders = Orders(
        host="127.0.0.1",
        argv=[sys.executable, str(RANKS), "ignore_requests", "--run-dir", str(tmp_path)],
        env={"RANK": "0"},
        forwarded={},
        starts_ranks=False,
        first_rank=0,
        ranks=1,
        silence_s=60.0,
        failure_s=60.0,
        watched=True,
    )
    command = HostCommand(orders, run, environ=dict(os.environ), leftover_s=0.0)
    try:
        pid = command._process.pid
        idle = until(command, "look", lambda event: any(look["pid"] == pid and look["idle"] for look in event["ranks"]))
        assert [look["rank"] for look in idle["ranks"]] == [0]
        os.kill(pid, signal.SIGSTOP)
        seen = until(command, "look", lambda event: any(look["stopped"] for look in event["ranks"]))
        assert [(look["rank"], look["stopped"], look["state"]) for look in seen["ranks"]] == [(0, pid, "T")]
        command.obey({"do": "places", "ask": 7})
        answer = until(command, "places")
        assert (answer["ask"], list(answer["places"]), answer["missing"]) == (7, ["0"], [])
        os.kill(pid, signal.SIGCONT)
        until(command, "look", lambda event: not any(look["stopped"] for look in event["ranks"]))
        command.obey({"do": "hang", "report": {"hang": "stopped", "text": "rank 0 has been stopped", "ranks": [0]}})
        assert [hang["text"] for hang in HangLog(tmp_path).read()] == ["rank 0 has been stopped"]
    finally:
        command.close()


def test_a_watch_that_fails_is_an_answer_and_ends_no_job(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.make()
    seeing = eyes.Eyes(run=run, ranks=range(2), starter=1, environ={}, sizes={}, counts_output=True)
    monkeypatch.setattr(eyes.places, "ask", lambda *words, **more: 1 / 0)
    seeing.ask(3)
    deadline = time.monotonic() + 60.0
    while not (events := seeing.events()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    assert events == [
        {"event": "places", "ask": 3, "places": {}, "missing": [], "error": "ZeroDivisionError: division by zero"}
    ]
