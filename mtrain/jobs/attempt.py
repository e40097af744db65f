"""Start the command of one host and watch it until it has ended.

Meanwhile records are passed on and requests to end are obeyed; at the end no process is left. The code is the same on
the only host of a job and on one of several: the source of requests and the listener for progress are parameters.
"""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtrain.core.interfaces import Command
from mtrain.errors import LaunchError
from mtrain.report.history import Record, Tail
from mtrain.system import diagnosis, processes, runfolder
from mtrain.system.diagnosis import Ending
from mtrain.system.runfolder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Waiting times in seconds."""

    poll_s: float = 0.1
    """Time between two checks of the ranks."""
    failure_s: float = 10.0
    """Time that the other ranks have to end by themselves after the first failure."""
    leftover_s: float = 5.0
    """Time that processes have to end after their starter has ended, before they are killed."""


class Asked(Protocol):
    """The requests to end a job. After the first one the job saves and ends; a second one ends it at once."""

    @property
    def count(self) -> int:
        """Number of requests so far."""
        ...

    @property
    def first(self) -> signal.Signals | None:
        """The signal of the first request; None: there was none."""
        ...

    @property
    def first_at(self) -> float | None:
        """Time of the first request in seconds since 1970; None: there was none, or its time is not needed."""
        ...


class Listener(Protocol):
    """The receiver of a job's progress: a ``Display``, or the leader of a job on several hosts."""

    def record(self, record: Record) -> None:
        """Receive one record, a line of ``metrics.jsonl``."""
        ...

    def note(self, text: str) -> None:
        """Receive a sentence for the user."""
        ...

    def tick(self) -> None:
        """Do what has to be done regularly. It is called about every ``Patience.poll_s`` seconds."""
        ...


@dataclass(kw_only=True)
class Attempt:
    """One run of a host's command, from its start to its end."""

    command: Command
    run_folder: RunFolder
    environ: Mapping[str, str]
    """Environment of the command; the command's own variables take precedence."""
    starts_ranks: bool
    """True: the command starts the ranks as its children. False: the command is itself the rank."""
    listener: Listener
    asked: Asked
    """The requests to end."""
    patience: Patience = field(default_factory=Patience)
    ranks: range | None = None
    """Ranks of this host, if other hosts write into the same folder; None: all ranks."""
    reads_records: bool = True
    """Whether this host reads and passes on the records of the job: it does if rank 0 runs here."""
    _spare: frozenset[int] = frozenset()
    _last: Record | None = None
    _answered: int = 0
    _deadline: float | None = None
    _killed: bool = False

    def run(self) -> Ending:
        """Start the command, watch it, and end every process that it leaves.

        Raises:
            LaunchError: the command cannot be started at all.
        """
        self._spare = frozenset(process.pid for process in processes.descendants())
        runfolder.set_aside_failures(self.run_folder, ranks=self.ranks)
        log = self.run_folder.starter_log
        former_sizes = runfolder.sizes(self.run_folder.logs)
        tail = Tail(self.run_folder.metrics)
        process = self._start(log)
        try:
            while process.poll() is None:
                self._show(tail)
                self._answer(process.pid)
                self._stop_after_failure()
                processes.reap(spare=process.pid)
                time.sleep(self.patience.poll_s)
        finally:
            ended = process.poll() is not None
            self._killed = self._killed or not ended
            at_once = not ended or self.asked.count > 1
            processes.end_all(spare=self._spare, grace_s=0.0 if at_once else self.patience.leftover_s)
            process.wait()
            processes.reap(spare=process.pid)
        self._show(tail)
        with log.open("rb") as file:
            file.seek(former_sizes.get(log.name, 0))
            printed = file.read().decode(errors="replace")
        return Ending(
            status=process.returncode,
            last=self._last,
            log=printed,
            rank_logs={
                rank: diagnosis.tail(path, start=former_sizes.get(path.name, 0))
                for rank, path in self.run_folder.rank_logs(self.ranks).items()
            },
            ended_here=self._killed,
        )

    def failures(self) -> list[dict[str, Any]]:
        """Return the failures that ranks of this host have written in this attempt, the earliest first."""
        return runfolder.read_failures(self.run_folder, ranks=self.ranks)

    def _start(self, log: Path) -> "subprocess.Popen[bytes]":
        try:
            return processes.start(self.command.argv, env={**self.environ, **self.command.env}, log=log)
        except OSError as error:
            raise LaunchError(
                f"{self.command.argv[0]} cannot be started: {error.strerror or error}; "
                "set backend.python to the interpreter of the ranks"
            ) from error

    def _show(self, tail: Tail) -> None:
        for record in tail.read() if self.reads_records else ():
            if record.get("kind") == "end":
                self._last = record
            self.listener.record(record)
        self.listener.tick()

    def _answer(self, leader: int) -> None:
        """Act on new requests to end: after the first, send SIGTERM to the ranks; after a second, kill everything."""
        if self.asked.count == self._answered:
            return
        self._answered = self.asked.count
        if self._answered > 1:
            self._kill()
            return
        again = "press Ctrl-C again" if self.asked.first == signal.SIGINT else "send SIGTERM again"
        self.listener.note(f"saving and ending ... ({again} to end at once)")
        # SIGTERM goes to the ranks and not to their starter, which would kill them, and their loader processes, after a
        # time limit of its own.
        ranks = processes.children_with(leader, _worker_arguments(self.command)) if self.starts_ranks else []
        processes.send(ranks or processes.by_id(leader), signal.SIGTERM)

    def _stop_after_failure(self) -> None:
        """Kill the remaining ranks ``failure_s`` after the first has failed: a collective may block them for ever."""
        if self._deadline is None:
            if diagnosis.real(self.failures()):
                self._deadline = time.monotonic() + self.patience.failure_s
        elif time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        """Kill every process of this attempt."""
        self._killed = True
        processes.end_all(spare=self._spare, grace_s=0.0)


def _worker_arguments(command: Command) -> Sequence[str]:
    """Return the last words of the ranks' command line, by which their processes are recognised."""
    return command.argv[list(command.argv).index("--run-dir") :] if "--run-dir" in command.argv else command.argv[-1:]
