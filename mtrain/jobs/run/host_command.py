"""The command of one host: start it, watch it until it has ended, and leave no process.

The code is the same on the only host of a job, where the supervisor calls it directly, and on one of several hosts,
where the agent calls it and passes its events on to the leader.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from mtrain.errors import LaunchError
from mtrain.jobs.watch.eyes import Eyes
from mtrain.jobs.watch.hang_log import HangLog
from mtrain.records.history import Tail
from mtrain.system import attempts, diagnosis, disk, environment, failures, processes, runfolder, warm
from mtrain.system.log_limit import LimitedLogs, Output, end_of
from mtrain.system.runfolder import RunFolder

LOG_BYTES = 256 * 1024
"""How much of the command's output is reported, counted from its end, where it names the rank that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """An order to run a host's command once: the fields of a "start" message."""

    host: str
    """This host's address in the list of hosts."""
    argv: list[str]
    """The command."""
    env: dict[str, str]
    """Variables that the plan sets for the command."""
    forwarded: dict[str, str]
    """Variables of the leader's environment. They override this host's own, and ``env`` overrides them."""
    starts_ranks: bool
    """True: the command starts the ranks as its children, as torchrun does. False: the command is itself the rank."""
    first_rank: int
    """The first rank on this host."""
    ranks: int
    """How many ranks run on this host."""
    silence_s: float
    """Seconds of silence after which the leader is lost."""
    failure_s: float
    """Seconds that the other ranks have to end by themselves after one has failed."""
    log_bytes: int | None = None
    """Size above which a piece of the middle of a log is left out; None: logs may grow."""
    launcher_logs: str | None = None
    """Folder of files that the command writes while the ranks run, as ``Launcher.own_logs`` names it."""
    knows_mtrain: bool = True
    """False: the ranks run a script of which mtrain knows nothing. It gets each signal as a program of its own would, once."""
    forwards_signals: bool = False
    """Whether the command passes signals on to its ranks, as ``Launcher.forwards_signals`` says."""
    shown: str = "none"
    """Ranks whose output is passed on: "none", "first" (rank 0) or "all"."""
    watched: bool = False
    """Whether the leader wants to know what the ranks look like from outside."""
    counts_output: bool = False
    """Whether what they print is progress, see ``Watching``."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Orders":
        """Read the orders from a message that may have other fields as well."""
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})


class HostCommand:
    """The running command of one host, with every process that it has started."""

    def __init__(self, orders: Orders, run: RunFolder, *, environ: Mapping[str, str], leftover_s: float) -> None:
        """Start the command.

        Args:
            orders: the command. Its own variables take precedence over ``environ``.
            run: the run folder. If it has the number of this host, other hosts write into the same folder, and only the
                files of this host's ranks are read.
            environ: environment of the command.
            leftover_s: seconds that processes have to end after their starter has ended, before they are killed.

        Raises:
            LaunchError: the command cannot be started at all.
            UsageError: ranks of an earlier attempt still run on this host.
        """
        self._orders = orders
        self._run = run
        self._leftover_s = leftover_s
        first = orders.first_rank
        self._ranks = None if run.node is None else range(first, first + orders.ranks)
        self._reads_records = first == 0
        self._killed = False
        self._asked_to_end = False
        self._kill_at = float("inf")
        """When the remaining ranks are killed, in monotonic time."""
        self._reported: set[tuple[Any, Any]] = set()
        """Rank and time of the failures that were reported."""
        # What this process runs besides, such as agents of other hosts or a warm copy, must outlive the command.
        self._spare = frozenset(process.pid for process in processes.descendants())
        attempts.await_former_ranks(run.path, run.node)
        self._mark = attempts.draw_mark(run.node)
        failures.set_aside_failures(run, ranks=self._ranks)
        # Logs are appended to by each attempt, and the verdict on this one may use only what it wrote.
        self._former_sizes = runfolder.sizes(run.logs)
        ranks = {"none": range(0), "first": range(max(0, 1 - first)), "all": range(orders.ranks)}[orders.shown]
        self._outputs = {rank: Output(run.rank_log(rank)) for rank in (first + index for index in ranks)}
        self._logs = LimitedLogs(
            [run.starter_log, *(run.rank_log(rank) for rank in range(first, first + orders.ranks))],
            limit_bytes=orders.log_bytes,
            foreign=None if orders.launcher_logs is None else Path(orders.launcher_logs),
        )
        self._tail = Tail(run.metrics)
        try:
            env = {**environment.join_variables(environ, orders.env), **self._mark.variables()}
            # A warm process has imported the framework already; a copy of it saves a short job most of its start.
            copy = warm.start(orders.argv, env=env, log=run.starter_log)
            self._process = copy or processes.start(orders.argv, env=env, log=run.starter_log)
        except OSError as error:
            raise LaunchError(
                f"{orders.argv[0]} cannot be started: {error.strerror or error}; "
                "set backend.python to the interpreter of the ranks"
            ) from error
        self._eyes = Eyes(
            run=run,
            ranks=range(first, first + orders.ranks),
            starter=self._process.pid,
            environ={**environ, **orders.env},
            sizes=self._former_sizes,
            counts_output=orders.counts_output,
        )

    def events(self, *, with_output: bool = True) -> list[dict[str, Any]]:
        """Return the events since the last call. "ended" is the last one; after it, this must not be called again.

        It must be called several times a second: what is due is done here. ``with_output``: False, what ranks print waits.
        """
        # A starter may end before ranks that save. Their records and failures come until the last of them has ended.
        has_ended = self._process.poll() is not None and not self._ranks_are_saving()
        if has_ended:
            self.close()
        else:
            processes.reap(spare=self._process.pid)
        shown = self._new_output(at_end=has_ended) if with_output or has_ended else []
        self._limit_logs(now=has_ended)
        records = self._tail.read() if self._reads_records else ()
        events: list[dict[str, Any]] = [{"event": "record", "record": record} for record in records]
        events += shown
        events += self._new_failures()
        events += self._eyes.events() if self._orders.watched and not has_ended else []
        if has_ended:
            events.append(self._end())
        elif time.monotonic() > self._kill_at:  # A collective may block the other ranks for ever.
            self.kill()
        return events

    def obey(self, message: Mapping[str, Any]) -> None:
        """Carry out "save", "stop", "end", "places" or "hang", see ``jobs/hosts/agent.py``; others are not for a command."""
        if message["do"] == "save":
            processes.send(self._rank_processes(), signal.SIGUSR1)
        elif message["do"] == "stop":
            self.ask_to_end(int(message["signal"]))
        elif message["do"] == "end":
            self.kill()
        elif message["do"] == "places":
            self._eyes.ask(message["ask"])
        elif message["do"] == "hang" and self._reads_records:
            HangLog(self._run.path).add(message["report"])

    def ask_to_end(self, number: int) -> None:
        """Send SIGTERM to the ranks, which then save and end; a script that does not know mtrain gets the signal ``number``."""
        asked, self._asked_to_end = self._asked_to_end, True
        if self._orders.knows_mtrain:
            # Their starter gets no signal: it would kill them, and their loader processes, after a time limit of its own.
            processes.send(self._rank_processes(), signal.SIGTERM)
        elif not asked:
            # A starter that forwards signals gets this one, or it would send another as soon as the first rank has ended.
            leader = processes.by_id(self._process.pid) if self._orders.forwards_signals else ()
            processes.send(leader or self._rank_processes(), signal.Signals(number))

    def _rank_processes(self) -> list[psutil.Process]:
        """Return the ranks that are running; while their starter has not started them yet, that one."""
        leader, ranks = self._process.pid, []
        if self._orders.starts_ranks:
            ranks = processes.children_with(leader, _worker_arguments(self._orders.argv))
        return ranks or processes.by_id(leader)

    def _ranks_are_saving(self) -> bool:
        """Return whether ranks that were asked to end have outlived their starter; the leader decides how long they may take."""
        # A scheduler may signal starters too, and some of them end before their ranks.
        if not self._asked_to_end or self._killed or not self._orders.starts_ranks:
            return False
        ranks = processes.children_with(os.getpid(), _worker_arguments(self._orders.argv))
        return any(rank.pid not in self._spare for rank in ranks)

    def kill(self) -> None:
        """Kill every process of the command."""
        self._killed = True
        processes.end_all(spare=self._spare, grace_s=0.0)

    def close(self) -> None:
        """End every process that is left; if the command itself still runs, at once. It may be called twice."""
        self._killed = self._killed or self._process.poll() is None
        processes.end_all(spare=self._spare, grace_s=0.0 if self._killed else self._leftover_s)
        self._process.wait()
        processes.reap(spare=self._process.pid)

    def _new_output(self, *, at_end: bool) -> list[dict[str, Any]]:
        """Return what ranks have printed, as bytes in the form of text."""
        # JSON carries text alone, and a piece may end within a character of UTF-8. ISO 8859-1 has a character for each byte.
        pieces = ((rank, piece) for rank, output in self._outputs.items() for piece in output.read(at_end=at_end))
        return [{"event": "output", "rank": rank, "text": piece.decode("latin-1")} for rank, piece in pieces]

    def _limit_logs(self, *, now: bool) -> None:
        for name, cut in self._logs.look(now=now).items():
            for output in self._outputs.values():
                output.skip(name, cut)
            self._former_sizes[name] = cut.offset_after(self._former_sizes.get(name, 0))

    def _new_failures(self) -> list[dict[str, Any]]:
        events = []
        for failure in failures.read_failures(self._run, ranks=self._ranks, attempt=self._mark.attempt):
            key = failure.get("rank"), failure.get("time")
            if key not in self._reported:
                self._reported.add(key)
                age_s = time.time() - float(failure.get("time") or time.time())
                events.append({"event": "failure", "failure": failure, "age_s": age_s})
                if diagnosis.real([failure]):
                    self._kill_at = min(self._kill_at, time.monotonic() + self._orders.failure_s)
        return events

    def _end(self) -> dict[str, Any]:
        former, starter_log = self._former_sizes, self._run.starter_log
        logs = self._run.rank_logs(self._ranks).items()
        return {
            "event": "ended",
            "status": self._process.returncode,
            "log": end_of(starter_log, start=former.get(starter_log.name, 0), limit_bytes=LOG_BYTES),
            "logs": {str(rank): diagnosis.tail(path, start=former.get(path.name, 0)) for rank, path in logs},
            "ended_here": self._killed,
            "full": disk.is_full(self._run.path),
            "missing": self._eyes.missing_ranks(),
            "summary": runfolder.read_summary(self._run.path) if self._reads_records else None,
        }


def _worker_arguments(argv: Sequence[str]) -> Sequence[str]:
    """Return the last words of the ranks' command line, by which their processes are recognised."""
    return argv[argv.index("--run-dir") :] if "--run-dir" in argv else argv[-1:]
