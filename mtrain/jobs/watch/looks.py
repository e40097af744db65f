"""What the ranks of a host look like from outside: the states of their processes, and how much these move.

Nothing is asked of a rank, and nothing here can be blocked by one: the kernel's tables are read, and the sizes of logs.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrain.spec.files import open_file
from mtrain.system.proc import BEGAN, PROC, read_stat, read_status

INTERVAL_S = 5.0
"""Seconds between two looks."""
IDLE_SHARE = 0.05
"""Share of a core below which a rank with all its children does nothing. One that waits in gloo takes less than 0.01."""
STARVED_SHARE = 0.5
"""Share of the time for which a process waits for a processor that others use, if it would compute. One that waits for other
ranks wakes up now and then, and waits for less."""
IDLE_BYTES = 64 << 10
"""Bytes that it may read and write meanwhile: a slow save or a slow disk moves more, and a rank that waits less."""
REFRESH_LOOKS = 12
"""After so many looks, processes that were not of this job are looked at again: their ids may have passed to others."""
STARTER = -1
"""In place of a rank's number: what has started the ranks."""
COMPILERS = ("cc1", "c++", "g++", "gcc", "clang", "ninja", "nvcc", "cicc", "ptxas", "ld", "as", "cudafe++")
"""How the names of programs begin that build an extension."""
MAX_LOCKS = 8
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""Unit of the processor times that the kernel tells."""
STALL_LINES = re.compile(
    rb"stall_inspector|One or more (?:tensors were submitted|rank \(marked)|^Missing ranks|^\s*\d+!?: \[", re.MULTILINE
)
"""Lines that Horovod prints about a hang, which are no sign of progress."""
MAX_GAINED_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLook:
    """One look at a rank and all its children."""

    rank: int
    pid: int = 0
    """0: it has not begun yet."""
    state: str = "R"
    """The kernel's letter for the state of its main thread; empty: it has ended."""
    idle: bool = False
    """Whether it has done nothing since the look before: see ``IDLE_SHARE`` and ``IDLE_BYTES``."""
    stopped: int = 0
    """The process, itself or a child, that a signal has stopped; 0: none."""
    name: str = ""
    """Name of the program of that process."""
    traced: bool = False
    """Whether a debugger is attached to it or to a child."""
    builds: bool = False
    """Whether a compiler runs among its children."""

    @property
    def works(self) -> bool:
        """Return whether there is nothing to say of it."""
        return not (self.idle or self.stopped or self.traced or self.state in ("", "D"))


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel tells of a process."""

    pid: int
    parent: int
    state: str
    ticks: int
    """Processor time of it and of its children that have ended."""
    started: int
    name: str


def _boot_time() -> float:
    """Return the time since the machine was started, with the time in which it slept, in seconds."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(kw_only=True)
class HostLooks:
    """The looks at the ranks of this host. ``look`` must be called more often than each ``INTERVAL_S``."""

    ranks: Sequence[int]
    starter: int
    """Id of the process that has started them."""
    pids: Callable[[], Mapping[int, tuple[int, ...]]]
    """Returns the ranks that have begun, each with the id and the start time of its process."""
    outputs: Sequence[Path] = ()
    """Files whose growth is progress."""
    locks: Callable[[], Sequence[Path]] = lambda: ()
    """Returns the locks of builds that exist. It is called while all ranks are idle."""
    clock: Callable[[], float] = time.monotonic
    """The time in which waiting is measured."""
    boot_clock: Callable[[], float] = _boot_time
    """The same with the time that this machine has slept."""
    proc: Path = PROC
    """Where the kernel's tables are."""
    _ticks: dict[int, int] = field(default_factory=dict)
    _bytes: dict[int, int] = field(default_factory=dict)
    _waited_s: dict[int, float] = field(default_factory=dict)
    _foreign: set[int] = field(default_factory=set)
    """Processes that are none of this job."""
    _children: Mapping[int, Sequence[Process]] = field(default_factory=dict)
    last: dict[int, RankLook] = field(default_factory=dict)
    """The last look at each rank."""
    _count: int = 0
    _has_spoken: bool = False

    def __post_init__(self) -> None:
        self._sizes = self._read_sizes()
        self._looked_at = self.clock()
        self._slept_s = self.boot_clock() - self._looked_at

    def look(self) -> dict[str, Any] | None:
        """Return a "look" event; None: it is not time yet, or all ranks work and nothing is new.

        Fields: ``span_s``; ``paused``: this process or machine did not run meanwhile; ``grew``: a log has grown; ``ranks``: those of
        which there is something to say, all others work; ``locks``.
        """
        now = self.clock()
        span_s = now - self._looked_at
        if span_s < INTERVAL_S:
            return None
        slept_s = self.boot_clock() - now
        paused = span_s > 3 * INTERVAL_S or slept_s - self._slept_s > INTERVAL_S
        self._looked_at, self._slept_s = now, slept_s
        sizes = self._read_sizes()
        grew = any(self._has_gained(path, sizes[path]) for path in sizes if sizes[path] != self._sizes.get(path))
        self._sizes = sizes
        looks = self._look_at_ranks(span_s)
        self.last = {look.rank: look for look in looks}
        notable = [look for look in looks if not look.works]
        # What was said of ranks counts until it is taken back.
        had_spoken, self._has_spoken = self._has_spoken, bool(notable)
        if not (notable or grew or paused or had_spoken):
            return None
        all_idle = all(look.idle or look.rank == STARTER for look in looks)
        return {
            "event": "look",
            "span_s": span_s,
            "paused": paused,
            "grew": grew,
            "ranks": [asdict(look) for look in notable],
            "locks": [str(path) for path in self.locks()[:MAX_LOCKS]] if all_idle else [],
        }

    def children(self) -> dict[int, list[int]]:
        """Return the children of each process as they were at the last look."""
        return {parent: [process.pid for process in found] for parent, found in self._children.items()}

    def _look_at_ranks(self, span_s: float) -> list[RankLook]:
        table, begun = self._read_processes(), self.pids()
        children: dict[int, list[Process]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process)
        self._children = children
        own = {
            rank: pid
            for rank, (pid, started) in begun.items()
            if pid in table and table[pid].started == started and table[pid].state not in "ZX"
        }
        tops = set(own.values())
        starter = _tree(self.starter, table, children, apart=tops)
        # Without a starter, the command is itself the rank, and is looked at as that alone.
        is_rank = self.starter in tops
        looks = [RankLook(rank=STARTER) if is_rank else self._judge(STARTER, self.starter, starter, span_s, table)]
        for rank in self.ranks:
            if rank in own:
                tree = _tree(own[rank], table, children, apart=tops - {own[rank]})
                looks.append(self._judge(rank, own[rank], tree, span_s, table))
            elif rank in begun:
                looks.append(RankLook(rank=rank, pid=begun[rank][0], state="", idle=True))
            else:  # What it does so far is done by its starter, or by a process that is not known for it yet.
                looks.append(RankLook(rank=rank, idle=looks[0].idle))
        self._waited_s = {pid: waited_s for pid, waited_s in self._waited_s.items() if pid in table}
        return [look for look in looks if look.rank != STARTER or look.stopped]

    def _judge(
        self, rank: int, pid: int, tree: Sequence[Process], span_s: float, table: Mapping[int, Process]
    ) -> RankLook:
        ticks = sum(process.ticks for process in tree)
        before = self._ticks.get(pid)
        self._ticks[pid] = ticks
        idle = before is not None and (ticks - before) * TICK_S < IDLE_SHARE * span_s
        starved = [process for process in tree if self._is_starved(process.pid, span_s)]
        idle = idle and not self._moves_bytes(pid, tree) and not starved
        halted = [process for process in tree if process.state in "Tt"]
        tracers = {process.pid: self._tracer(process.pid) for process in halted}
        stopped = next((process for process in halted if process.state == "T" and not tracers[process.pid]), None)
        main = table.get(pid)
        return RankLook(
            rank=rank,
            pid=pid,
            state="" if main is None or main.state in "ZX" else main.state,
            idle=idle,
            stopped=0 if stopped is None else stopped.pid,
            name="" if stopped is None else stopped.name,
            traced=any(tracers.values()) or (idle and self._tracer(pid)),
            builds=any(process.name.startswith(COMPILERS) for process in tree),
        )

    # ------------------------------------------------------------------------------------------------ the kernel's tables
    def _read_processes(self) -> dict[int, Process]:
        """Return the processes of this machine without those that were found to be none of this job's."""
        if self._count % REFRESH_LOOKS == 0:
            self._foreign.clear()
        self._count += 1
        pids = {int(name) for name in os.listdir(self.proc) if name.isdigit()} - self._foreign
        table = {process.pid: process for process in map(self._read_process, pids) if process is not None}
        ours = {os.getpid(), self.starter}
        for pid in table:
            line = [pid]
            while line[-1] in table and line[-1] not in ours and len(line) <= len(table):
                line.append(table[line[-1]].parent)
            # A process whose parent was left out is none of ours either: those of the job have ours above them.
            (ours if line[-1] in ours else self._foreign).update(line)
        return table

    def _read_process(self, pid: int) -> Process | None:
        name, fields = read_stat(pid, proc=self.proc)
        try:
            return Process(pid, int(fields[1]), fields[0], sum(map(int, fields[11:15])), int(fields[BEGAN]), name)
        except (ValueError, IndexError):  # it has ended meanwhile
            return None

    def _is_starved(self, pid: int, span_s: float) -> bool:
        """Return whether a process would have run for most of the time since the last look, but others had the processors."""
        try:
            waited_s = int((self.proc / str(pid) / "schedstat").read_text("utf-8").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the kernel does not tell
            return False
        before, self._waited_s[pid] = self._waited_s.get(pid, waited_s), waited_s
        return waited_s - before >= STARVED_SHARE * span_s

    def _moves_bytes(self, pid: int, tree: Sequence[Process]) -> bool:
        moved = sum(self._read_bytes(process.pid) for process in tree)
        before, self._bytes[pid] = self._bytes.get(pid), moved
        return before is not None and abs(moved - before) >= IDLE_BYTES

    def _read_bytes(self, pid: int) -> int:
        try:
            lines = (self.proc / str(pid) / "io").read_text("utf-8").split("\n")
            return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))
        except (OSError, ValueError):
            return 0

    def _tracer(self, pid: int) -> bool:
        return read_status(pid, proc=self.proc).get("TracerPid", "0") != "0"

    # ----------------------------------------------------------------------------------------------------------- the logs
    def _read_sizes(self) -> dict[Path, int]:
        sizes = {}
        for path in self.outputs:
            try:
                sizes[path] = path.stat().st_size
            except OSError:  # not there yet
                continue
        return sizes

    def _has_gained(self, path: Path, size: int) -> bool:
        """Return whether a log has gained more than what Horovod says of a hang. A log that was shortened has grown before."""
        before = self._sizes.get(path, 0)
        if not 0 < size - before <= MAX_GAINED_BYTES:
            return True
        try:
            with open_file(path) as file:
                file.seek(before)
                gained = file.read(size - before)
        except OSError:
            return True
        return any(not STALL_LINES.search(line) for line in gained.splitlines() if line.strip())


def _tree(
    top: int, table: Mapping[int, Process], children: Mapping[int, Sequence[Process]], *, apart: set[int]
) -> list[Process]:
    """Return a process and its descendants without those below processes ``apart``."""
    tree = [table[top]] if top in table else []
    for process in tree:  # grows while it is read
        tree += [child for child in children.get(process.pid, ()) if child.pid not in apart and child.pid != top]
    return tree
