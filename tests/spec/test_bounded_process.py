"""A process of its own for what a stranger's file makes a library do: its bounds, its errors and its end."""

import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from mtrain.spec.bounded_process import BoundedProcess, Failed

pytestmark = [pytest.mark.job, pytest.mark.smoke]

MIB = 1 << 20


class Worker:
    """What the process holds; each method ends otherwise."""

    def __init__(self, name: str) -> None:
        if name == "bad":
            raise ValueError("no such\nname")
        self.name = name

    def swap(self, value: Any, payloads: Sequence[bytes]) -> tuple[Any, list[bytes]]:
        return [self.name, value], [payload[::-1] for payload in payloads]

    def spin(self, _: Any) -> None:
        while True:
            pass

    def fill(self, size: int, _: Any) -> tuple[int, list[bytes]]:
        return len(bytearray(size)), []

    def deep(self, _: Any) -> Any:
        return self.deep(_)

    def end(self, number: int, _: Any) -> None:
        os.kill(os.getpid(), number)

    def leave(self, _: Any) -> None:
        raise SystemExit(3)

    def seen(self, _: Any) -> tuple[list[str], list[bytes]]:
        print("not an answer")
        return sorted(os.environ), []


def process(name: str = "x", **bounds: Any) -> BoundedProcess:
    return BoundedProcess(f"{__name__}:Worker", name, **{"limit_bytes": 256 * MIB, **bounds})


def test_values_and_bytes_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRAIN_JOB_SECRET", "secret")
    found = process()
    assert found.call("swap", {"a": [1.5, None, "ü\ud800"]}, payloads=[b"", b"abc"]) == (
        ["x", {"a": [1.5, None, "ü\ud800"]}],
        [b"", b"cba"],
    )
    assert not {"MTRAIN_JOB_SECRET", "PYTHONPATH"} & set(found.call("seen")[0])
    with pytest.raises(Failed, match=r"^3$") as caught:
        found.call("leave")
    assert caught.value.kind == "SystemExit"
    with pytest.raises(Failed, match="nested too deeply"):
        found.call("deep")
    assert found.call("swap", 1)[0] == ["x", 1], "an error of a method ends nothing"
    found.close()


def test_time_and_memory_are_bounded_and_the_next_call_begins_again() -> None:
    found = process(seconds=1)
    with pytest.raises(Failed, match=r"takes more than 0\.2 GiB of memory"):
        found.call("fill", 400 * MIB)
    assert found.call("fill", 400 * MIB, limit_bytes=600 * MIB)[0] == 400 * MIB
    with pytest.raises(Failed, match="takes more than 1 s of processor time"):
        found.call("spin")
    with pytest.raises(Failed, match=r"by SIGFPE: a fault in the library$"):
        found.call("end", 8)
    with pytest.raises(Failed, match=r"by SIGABRT: a fault in the library, or more than 0\.2 GiB of memory"):
        found.call("end", 6)
    assert found.call("swap", 1)[0] == ["x", 1]
    found.close()


def test_what_cannot_be_made_is_named_and_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(Failed, match=r"^no such name$") as caught:
        process("bad").call("swap", 1)
    assert caught.value.kind == "ValueError"
    for _ in range(2):
        found = process()
        found.call("swap", 1)
        del found
    gc.collect()
    deadline = time.monotonic() + 20
    while {child.pid for child in psutil.Process().children()} - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_copy_of_the_owner_ends_nothing() -> None:
    found = process()
    found.call("swap", 1)
    pid = os.fork()
    if pid == 0:
        found.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert found.call("swap", 2)[0] == ["x", 2]
    found.close()


def test_a_process_that_computes_without_end_does_not_outlive_the_one_that_started_it() -> None:
    """Its owner is killed, so nobody ends it."""
    ready, told = os.pipe()
    owner = os.fork()
    if owner == 0:
        found = process()
        found.call("swap", 1)
        assert found._process is not None
        os.write(told, str(found._process.pid).encode())
        found.call("spin")
    pid = int(os.read(ready, 20))
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    os.close(ready)
    os.close(told)
