"""What the agent of a host does with an order before and after its command runs, without a process."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.agent import command_environment
from mtrain.jobs.run import host_command
from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.system.runfolder import RunFolder


def orders(**changes: object) -> Orders:
    fields = {"argv": ["rank"], "env": {}, "forwarded": {}, "first_rank": 0, "ranks": 1, "starts_ranks": True}
    return Orders(host="127.0.0.1", silence_s=60.0, failure_s=60.0, **{**fields, **changes})


def test_forwarded_variables_replace_those_of_the_host_and_stale_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("WORLD_SIZE", "9"), ("KEPT", "here"), ("NCCL_DEBUG", "the host's own")):
        monkeypatch.setenv(name, value)
    environ = command_environment(orders(forwarded={"NCCL_DEBUG": "INFO", "MASTER_PORT": "7"}))
    assert "WORLD_SIZE" not in environ
    assert (environ["KEPT"], environ["NCCL_DEBUG"], environ["MASTER_PORT"]) == ("here", "INFO", "7")
    assert environ["GLOO_SOCKET_IFNAME"] == environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_an_attempt_is_judged_by_what_was_logged_since_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.make()
    logs = run.starter_log, run.rank_log(0)
    for log in logs:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("Traceback of the first attempt\n")
    ended = SimpleNamespace(pid=os.getpid(), returncode=4, poll=lambda: 4, wait=lambda: 4)
    monkeypatch.setattr(host_command.warm, "start", lambda *_, **__: ended)
    command = HostCommand(orders(), run, environ={}, leftover_s=0.0)
    for log in logs:
        with log.open("a") as file:
            file.write("the second attempt\n")
    (event,) = command.events()
    assert (event["status"], event["log"], event["logs"]["0"].strip()) == (
        4,
        "the second attempt\n",
        "the second attempt",
    )


def test_warnings_are_collected_once_each_and_no_more_than_an_answer_carries() -> None:
    log = logging.getLogger("mtrain.of.a.test")
    with messages.collect_warnings() as texts:
        for number in (0, 0, *range(messages.MAX_WARNINGS + 5)):
            log.warning("step %s is damaged", number)
        log.info("not worth a word")
    log.warning("too late")
    assert texts == [f"step {number} is damaged" for number in range(messages.MAX_WARNINGS)]
