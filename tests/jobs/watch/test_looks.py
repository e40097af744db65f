"""Looks at ranks from outside: a hang is seen in the kernel's tables, and work in any form is no hang."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mtrain.jobs.watch.looks import INTERVAL_S, HostLooks
from mtrain.system import attempts

STARTER, RANK0, RANK1, WORKER = 100, 110, 111, 120


@dataclass
class Machine:
    """A machine whose kernel's tables are files."""

    root: Path
    now: float = 1000.0
    slept: float = 0.0
    ticks: dict[int, int] = field(default_factory=dict)
    begun: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: (RANK0, 7), 1: (RANK1, 7)})
    locks: list[Path] = field(default_factory=list)

    def process(self, pid, parent, *, state="S", ticks=0, tracer=0, name="python", moved=0, started=7, starved_s=0.0):
        self.ticks[pid] = self.ticks.get(pid, 0) + ticks
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        used = self.ticks[pid]
        words = [state, parent, *[0] * 9, used // 2, used - used // 2, 0, 0, *[0] * 4, started, 0]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, words))}\n")
        (folder / "status").write_text(f"Name:\t{name}\nState:\t{state}\nTracerPid:\t{tracer}\nUid:\t0\n")
        (folder / "schedstat").write_text(f"{used * 10_000_000} {int(starved_s * 1e9)} 99\n")
        (folder / "io").write_text(f"rchar: {moved}\nwchar: 0\nsyscr: 99999999\n")

    def looks(self, **more) -> HostLooks:
        return HostLooks(
            ranks=range(2),
            starter=STARTER,
            pids=lambda: self.begun,
            locks=lambda: self.locks,
            clock=lambda: self.now,
            boot_clock=lambda: self.now + self.slept,
            proc=self.root / "proc",
            **more,
        )

    def after(self, looks: HostLooks, seconds: float = INTERVAL_S):
        self.now += seconds
        return looks.look()


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    machine.process(1, 0)
    machine.process(STARTER, 1)
    machine.process(RANK0, STARTER)
    machine.process(RANK1, STARTER)
    machine.process(WORKER, RANK1)
    machine.process(999, 1, ticks=10_000)
    return machine


def ranks_of(event):
    return {look["rank"]: look for look in event["ranks"]} if event else {}


def test_a_rank_that_gets_no_processor_because_others_use_it_is_not_idle(machine):
    looks = machine.looks()
    machine.after(looks)
    machine.process(RANK0, STARTER, state="R", ticks=10, starved_s=4.0)
    machine.process(WORKER, RANK1, ticks=1, starved_s=4.0)
    assert machine.after(looks) is None
    machine.process(RANK0, STARTER, ticks=10, starved_s=5.9)  # one that wakes up now and then waits for a part
    machine.process(WORKER, RANK1, ticks=1, starved_s=4.0)
    assert {rank: look["idle"] for rank, look in ranks_of(machine.after(looks)).items()} == {0: True, 1: True}


def test_ranks_that_do_nothing_are_idle_and_one_that_works_is_not_spoken_of(machine):
    looks = machine.looks()
    assert machine.after(looks) is None, "one look alone cannot tell"
    machine.process(RANK0, STARTER, ticks=2)
    machine.process(RANK1, STARTER, ticks=400)
    event = machine.after(looks)
    assert {rank: look["idle"] for rank, look in ranks_of(event).items()} == {0: True}
    assert (event["grew"], event["paused"]) == (False, False)


def test_no_look_is_made_before_its_time(machine):
    looks = machine.looks()
    machine.after(looks)
    assert machine.after(looks, INTERVAL_S / 2) is None
    assert machine.after(looks, INTERVAL_S / 2) is not None


@pytest.mark.parametrize("who", [WORKER, 121])
def test_the_work_of_a_child_is_that_of_its_rank_also_once_it_has_ended(machine, who):
    machine.process(who, RANK1)
    looks = machine.looks()
    machine.after(looks)
    machine.process(who, RANK1, ticks=300)
    assert set(ranks_of(machine.after(looks))) == {0}
    # Its time passes to its parent when it has ended.
    folder = machine.root / "proc" / str(who)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    machine.process(RANK1, STARTER, ticks=600)
    assert set(ranks_of(machine.after(looks))) == {0}
    assert ranks_of(machine.after(looks))[1]["idle"]


def test_a_slow_save_is_no_idleness(machine):
    looks = machine.looks()
    machine.after(looks)
    machine.after(looks)
    machine.process(RANK0, STARTER, moved=200 << 10)
    machine.process(RANK1, STARTER, moved=2 << 10)
    assert set(ranks_of(machine.after(looks))) == {1}


@pytest.mark.parametrize(
    ("pid", "state", "tracer", "stopped", "traced"),
    [
        (RANK1, "T", 0, RANK1, False),
        (WORKER, "T", 0, WORKER, False),
        (RANK1, "T", 4711, 0, True),
        (RANK1, "t", 4711, 0, True),
        (RANK1, "D", 0, 0, False),
    ],
)
def test_a_stopped_process_is_told_from_one_under_a_debugger(machine, pid, state, tracer, stopped, traced):
    looks = machine.looks()
    machine.process(pid, RANK1 if pid == WORKER else STARTER, state=state, tracer=tracer, name="a (strange) name")
    look = ranks_of(machine.after(looks))[1]
    assert (look["stopped"], look["traced"]) == (stopped, traced)
    assert look["name"] == ("a (strange) name" if stopped else "")
    assert look["state"] == ("S" if pid == WORKER else state)


def test_a_rank_without_a_starter_is_one_rank(machine):
    machine.begun = {0: (STARTER, 7)}
    looks = machine.looks()
    machine.after(looks)
    machine.process(STARTER, 1, ticks=300)
    assert 0 not in ranks_of(machine.after(looks)), "it works"
    machine.process(STARTER, 1, state="T")
    assert [look["rank"] for look in machine.after(looks)["ranks"] if look["stopped"]] == [0]


def test_a_stopped_starter_is_seen(machine):
    looks = machine.looks()
    machine.process(STARTER, 1, state="T")
    assert ranks_of(machine.after(looks))[-1]["stopped"] == STARTER


def test_a_debugger_that_waits_without_stopping_the_rank_is_seen(machine):
    looks = machine.looks()
    machine.after(looks)
    machine.process(RANK1, STARTER, tracer=4711)
    assert ranks_of(machine.after(looks))[1]["traced"]


def test_a_rank_that_has_ended_and_another_one_with_its_id_are_told_apart(machine):
    machine.begun[1] = (RANK1, 6)
    looks = machine.looks()
    look = ranks_of(machine.after(looks))[1]
    assert (look["state"], look["idle"]) == ("", True)


def test_a_rank_that_has_not_begun_is_as_idle_as_its_starter(machine):
    del machine.begun[1]
    looks = machine.looks()
    machine.after(looks)
    assert ranks_of(machine.after(looks))[1]["pid"] == 0
    machine.process(RANK1, STARTER, ticks=500)
    assert 1 not in ranks_of(machine.after(looks)), "it imports its framework"


def test_what_was_said_of_a_rank_is_taken_back_once(machine):
    looks = machine.looks()
    machine.after(looks)
    assert set(ranks_of(machine.after(looks))) == {0, 1}
    for expected in ([], None):
        machine.process(RANK0, STARTER, ticks=100)
        machine.process(RANK1, STARTER, ticks=100)
        event = machine.after(looks)
        assert (event and event["ranks"]) == expected


def test_compilers_among_the_children_are_seen(machine):
    looks = machine.looks()
    machine.after(looks)
    machine.process(130, WORKER, name="cc1plus")
    machine.process(131, 1, name="ninja")
    event = ranks_of(machine.after(looks))
    assert (event[0]["builds"], event[1]["builds"]) == (False, True)


def test_locks_are_looked_for_while_all_are_idle_alone(machine):
    machine.locks = [Path("/a/lock")]
    looks = machine.looks()
    machine.after(looks)
    assert machine.after(looks)["locks"] == ["/a/lock"]
    machine.process(RANK0, STARTER, ticks=100)
    assert machine.after(looks)["locks"] == []


def test_a_laptop_that_slept_and_a_process_that_was_suspended_are_pauses(machine):
    looks = machine.looks()
    machine.after(looks)
    machine.slept = 3600.0
    assert machine.after(looks)["paused"]
    assert not machine.after(looks)["paused"]
    assert machine.after(looks, 120.0)["paused"]


def test_output_is_progress_unless_it_is_what_horovod_says_of_a_hang(machine, tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("begun\n")
    looks = machine.looks(outputs=[log, tmp_path / "missing.log"])
    machine.after(looks)
    with log.open("a") as file:
        file.write(
            "[2026-01-01: W stall_inspector.cc:107] One or more tensors were submitted to be reduced\n"
            "Missing ranks:\n1: [allreduce.x]\n"
        )
    assert not machine.after(looks)["grew"]
    with log.open("a") as file:
        file.write("epoch 2\n")
    assert machine.after(looks)["grew"]
    log.write_text("cut\n")
    assert machine.after(looks)["grew"], "a log that was shortened has grown before"
    (tmp_path / "missing.log").write_text("there now\n")
    assert machine.after(looks)["grew"]


def test_tables_that_are_torn_are_passed_over(machine):
    looks = machine.looks()
    (machine.root / "proc" / str(WORKER) / "stat").write_text("120 (pyth")
    (machine.root / "proc" / "130").mkdir()
    (machine.root / "proc" / str(RANK0) / "io").unlink()
    machine.after(looks)
    assert set(ranks_of(machine.after(looks))) == {0, 1}


@pytest.mark.job
def test_real_processes_are_seen(tmp_path):
    """A rank that was stopped, one that sleeps and one that computes, as the kernel shows them."""
    programs = ["import time; time.sleep(600)", "import time; time.sleep(600)", "while True: pass"]
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]
    now = 0.0
    try:
        ranks[0].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, ranks[0].pid, os.WSTOPPED)
        begun = {rank: (process.pid, attempts._ticks(process.pid)) for rank, process in enumerate(ranks)}
        looks = HostLooks(
            ranks=range(3), starter=os.getpid(), pids=lambda: begun, clock=lambda: now, boot_clock=lambda: now
        )
        now += INTERVAL_S
        looks.look()
        deadline = time.monotonic() + 60.0
        while looks._read_process(ranks[2].pid).ticks < looks._ticks[ranks[2].pid] + 40:
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)
        now += INTERVAL_S
        event = looks.look()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    seen = ranks_of(event)
    assert {rank: (look["state"], bool(look["stopped"])) for rank, look in seen.items()} == {
        0: ("T", True),
        1: ("S", False),
    }
