"""The rules that tell a hang from work, on sequences of looks as they were measured on hanging and on healthy jobs."""

from collections.abc import Sequence

import pytest

from mtrain.jobs.watch.looks import INTERVAL_S, STARTER, RankLook
from mtrain.jobs.watch.rules import Rules, Times

POLLING = Times(cpu_tells=False)


def look(rank: int, what: str) -> RankLook | None:
    """Return a look at a rank: w works, i idle, T stopped, d under a debugger, D waits for a disk, b idle but a child compiles."""
    if what == "w":
        return None
    return RankLook(
        rank=rank,
        pid=100 + rank,
        state={"T": "T", "D": "D", "e": ""}.get(what, "S"),
        idle=what != "b",
        stopped=100 + rank if what == "T" else 0,
        traced=what == "d",
        builds=what == "b",
    )


class Simulation:
    """Applies the rules to phases, and keeps what they have found, with the time in which it was found first."""

    def __init__(self, size: int, times: Times | None = None, *, hosts: int = 1) -> None:
        self.now = 0.0
        self.size = size
        self.hosts = hosts
        self.rules = Rules(times=times or Times(), size=size, began=0.0)
        self.spoke: set[int] = set()
        self.found: dict[tuple[str, tuple[int, ...]], float] = {}

    def phase(
        self,
        seconds: float,
        states: str,
        *,
        progress_s: float | None = None,
        locks: Sequence[str] = (),
        paused: bool = False,
    ) -> "Simulation":
        """Let ``seconds`` pass in which the ranks look like ``states``; ``progress_s``: a sign of progress each so many."""
        last = self.now
        for _ in range(int(seconds // INTERVAL_S)):
            self.now += INTERVAL_S
            if progress_s is not None and self.now - last >= progress_s:
                last = self.now
                self.rules.note_progress(self.now)
            looks = [each for rank, what in enumerate(states) if (each := look(rank, what)) is not None]
            share = self.size // self.hosts
            for host in range(self.hosts):
                ranks = range(host * share, (host + 1) * share)
                own = [each for each in looks if each.rank in ranks]
                if own or paused or host in self.spoke:
                    self.spoke = self.spoke - {host} | ({host} if own else set())
                    self.rules.take(
                        {
                            "span_s": INTERVAL_S,
                            "paused": paused,
                            "grew": False,
                            "ranks": [{name: getattr(each, name) for name in each.__slots__} for each in own],
                            "locks": list(locks),
                        },
                        ranks,
                        self.now,
                    )
            for finding in self.rules.find(self.now):
                self.found.setdefault(finding.key, self.now)
        return self


HEALTHY = {
    "trains": lambda: Simulation(2).phase(120, "ww", progress_s=5),
    "trains without a word": lambda: Simulation(2).phase(900, "ww"),
    "32 s of numpy on one rank, the other waits": lambda: Simulation(2).phase(30, "ww", progress_s=5).phase(37, "wi"),
    "a long sort on one rank, records each 20 s before": lambda: (
        Simulation(2).phase(100, "ww", progress_s=20).phase(150, "wi")
    ),
    "a save of 600 MB": lambda: Simulation(3).phase(30, "www", progress_s=5).phase(30, "wii"),
    "all wait for slow storage for 40 s": lambda: Simulation(2).phase(30, "ww", progress_s=5).phase(40, "ii"),
    "a pause of 30 s in each epoch": lambda: [
        simulation := Simulation(2),
        *(simulation.phase(30, "ww", progress_s=5).phase(30, "ii") for _ in range(5)),
    ][0],
    "pauses that become longer": lambda: [
        simulation := Simulation(2),
        *(simulation.phase(30, "ww", progress_s=5).phase(seconds, "ii") for seconds in (30, 50, 80, 120)),
    ][0],
    "the first compilation, one rank at the baton": lambda: Simulation(2).phase(115, "bi", locks=["/x/lock"]),
    "a debugger": lambda: Simulation(2).phase(30, "ww", progress_s=5).phase(900, "di"),
    "a debugger that has stopped the rank": lambda: Simulation(2).phase(900, "di"),
    "one rank alone that computes": lambda: Simulation(1).phase(900, "w"),
    "Horovod trains, its ranks poll": lambda: Simulation(3, POLLING).phase(300, "www", progress_s=30),
    "Horovod, a script that prints each minute": lambda: Simulation(2, POLLING).phase(1200, "ww", progress_s=60),
    "Horovod, one rank alone": lambda: Simulation(1, POLLING).phase(900, "w"),
    "a laptop that sleeps each half minute": lambda: [
        simulation := Simulation(2),
        *(simulation.phase(30, "ii").phase(5, "ii", paused=True) for _ in range(5)),
    ][0],
    "stopped for a moment": lambda: [
        simulation := Simulation(2),
        *(simulation.phase(5, "Tw").phase(5, "ww", progress_s=5) for _ in range(5)),
    ][0],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_is_not_reported(name):
    assert HEALTHY[name]().found == {}


HANGS = {
    "SIGSTOP, the other waits": (lambda: Simulation(2).phase(60, "iT"), ("stopped", (1,)), 15),
    "SIGSTOP, others go on": (lambda: Simulation(3).phase(60, "wTw", progress_s=5), ("stopped", (1,)), 15),
    "two ranks stopped": (lambda: Simulation(3).phase(60, "TiT"), ("stopped", (0, 2)), 15),
    "Horovod, SIGSTOP": (lambda: Simulation(2, POLLING).phase(60, "wT"), ("stopped", (1,)), 15),
    "a mismatch: all wait": (lambda: Simulation(3).phase(120, "iii"), ("still", ()), 45),
    "all wait, on three hosts": (lambda: Simulation(3, hosts=3).phase(120, "iii"), ("still", ()), 45),
    "one waits for a disk": (lambda: Simulation(2).phase(120, "Di"), ("still", ()), 45),
    "one has ended": (lambda: Simulation(2).phase(120, "ei"), ("still", ()), 45),
    "one rank alone sleeps": (lambda: Simulation(1).phase(120, "i"), ("still", ()), 45),
    "an endless loop on one rank": (lambda: Simulation(3).phase(200, "iwi"), ("slow", ()), 60),
    "Horovod, a mismatch": (
        lambda: Simulation(2, POLLING).phase(100, "ww", progress_s=5).phase(99, "ww"),
        ("slow", ()),
        160,
    ),
    "a stale lock": (lambda: Simulation(2).phase(60, "ii", locks=["/x/lock"]), ("lock", ()), 20),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_found_in_time(name):
    make, key, at_s = HANGS[name]
    simulation = make()
    assert simulation.found[key] == at_s
    assert {each for each, _ in simulation.found} == {key[0]}


def test_a_rank_that_is_stopped_later_is_one_more_finding():
    simulation = Simulation(3).phase(30, "Tii").phase(30, "TTi")
    assert sorted(simulation.found) == [("stopped", (0,)), ("stopped", (0, 1))]


def test_a_hang_tells_when_it_began():
    simulation = Simulation(2).phase(60, "ww", progress_s=5).phase(60, "ii")
    (finding,) = simulation.rules.find(simulation.now)
    assert finding.since == 60.0


def test_progress_ends_a_finding():
    simulation = Simulation(2).phase(60, "ii")
    assert simulation.rules.find(simulation.now)
    simulation.rules.note_progress(simulation.now + 1)
    assert simulation.rules.find(simulation.now + 2) == []


def test_a_slow_job_is_measured_by_its_own_pace():
    """A script that prints each 40 s is not slow before 400 s, and what it did before its first line does not count."""
    found = Simulation(2).phase(100, "ww").phase(200, "ww", progress_s=40).phase(600, "wi").found
    assert found == {("slow", ()): 280 + 400 + 20}


def test_what_a_script_prints_is_no_slower_than_the_looks_can_tell():
    """Lines that come each second are seen each 5 s, on a crowded machine each 7 s: it is slow after 60 s all the same."""
    rules = Rules(times=Times(), size=2, began=0.0)
    idle = [{"rank": 0, "pid": 1, "state": "S", "idle": True}]
    for number in range(1, 8):
        rules.take({"span_s": 7.0, "paused": False, "grew": True, "ranks": [], "locks": []}, range(2), 7.0 * number)
        rules.find(7.0 * number)
    for now in range(54, 115, 5):
        rules.take({"span_s": 5.0, "paused": False, "grew": False, "ranks": idle, "locks": []}, range(2), float(now))
        found = rules.find(min(now, 108.0))
    assert found == []
    assert [finding.kind for finding in rules.find(109.0)] == ["slow"]


def test_a_host_that_says_nothing_of_its_ranks_has_ranks_that_work():
    simulation = Simulation(2, hosts=2).phase(40, "ii").phase(200, "iw")
    assert set(simulation.found) == {("slow", ())}
    assert not simulation.rules.still_since(simulation.now)


def test_ranks_are_asked_early_where_their_library_gives_up():
    times = Times(asked_s=15.0)
    simulation = Simulation(2, times).phase(10, "ii")
    assert not simulation.rules.is_early(simulation.now)
    simulation.phase(5, "ii")
    assert simulation.rules.is_early(simulation.now)
    assert simulation.found == {}
    simulation.phase(5, "iw")
    assert simulation.rules.is_early(simulation.now), "one still waits, for a rank that may never come"
    simulation.phase(5, "ww")
    assert not simulation.rules.is_early(simulation.now)
    simulation.phase(5, "iw").phase(10, "iw", progress_s=5)
    assert not simulation.rules.is_early(simulation.now)


def test_whoever_looks_and_was_suspended_begins_anew():
    simulation = Simulation(2).phase(40, "ii")
    simulation.now += 600
    assert simulation.rules.find(simulation.now) == []
    assert simulation.phase(40, "ii").found == {}
    assert set(simulation.phase(10, "ii").found) == {("still", ())}


@pytest.mark.parametrize(
    ("times", "states"),
    [
        (Times(stopped_s=None, still_s=None), "Ti"),
        (Times(still_s=None, slow_s=None), "ii"),
        (Times(slow_s=None), "wi"),
        (Times(lock_s=None, still_s=None), "ii"),
    ],
)
def test_a_rule_that_is_switched_off_finds_nothing(times, states):
    assert Simulation(2, times).phase(900, states, locks=["/x/lock"] if times.lock_s is None else []).found == {}


def test_a_lock_is_none_while_a_compiler_runs():
    """A rank whose child compiles may take no processor itself, as while it writes what was compiled."""
    rules = Rules(times=Times(still_s=None), size=2, began=0.0)
    looks = [RankLook(rank=0, pid=1, state="S", idle=True, builds=True), RankLook(rank=1, pid=2, state="S", idle=True)]
    for now in range(5, 65, 5):
        fields = [{name: getattr(each, name) for name in each.__slots__} for each in looks]
        message = {"span_s": 5.0, "paused": False, "grew": False, "ranks": fields, "locks": ["/x/lock"]}
        rules.take(message, range(2), float(now))
        found = rules.find(float(now))
    assert rules.still_since(60.0) is not None
    assert found == []


def test_a_stopped_starter_is_found():
    rules = Rules(times=Times(), size=1, began=0.0)
    starter = RankLook(rank=STARTER, pid=7, state="T", stopped=7)
    for now in (5.0, 10.0, 15.0):
        fields = {name: getattr(starter, name) for name in starter.__slots__}
        rules.take({"span_s": 5.0, "paused": False, "grew": True, "ranks": [fields], "locks": []}, range(1), now)
    assert [finding.ranks for finding in rules.find(15.0)] == [(STARTER,)]
