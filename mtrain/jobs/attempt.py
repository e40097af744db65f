"""One start of the command of one host, watched to its end: progress passed on, requests answered, everything ended afterwards.

The same on a job's only host and on one of many: who asks, and whom progress is told, is handed in.
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
    """How long to wait for what, in seconds."""

    poll_s: float = 0.1
    """Between two looks at the ranks."""
    failure_s: float = 10.0
    """For the other ranks to end by themselves after the first failure."""
    leftover_s: float = 5.0
    """For processes that outlive their starter, before they are killed."""


class Asked(Protocol):
    """Requests to end: one is polite, a second one means at once."""

    @property
    def count(self) -> int:
        """How often the end was asked for."""
        ...

    @property
    def first(self) -> signal.Signals | None:
        """The signal of the first request; None: there was none."""
        ...

    @property
    def first_at(self) -> float | None:
        """When the first request came, in seconds since 1970; None: there was none, or nobody needs to know."""
        ...


class Listener(Protocol):
    """Who hears what happens: a ``Display``, or the leader of a job on several hosts."""

    def record(self, record: Record) -> None:
        """One line of ``metrics.jsonl``."""
        ...

    def note(self, text: str) -> None:
        """A sentence."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...


@dataclass(kw_only=True)
class Attempt:
    """A command of this host in a run folder."""

    command: Command
    run_folder: RunFolder
    environ: Mapping[str, str]
    """Of the command, under its own variables."""
    starts_ranks: bool
    """Whether the command starts the ranks as its children; else it is the rank."""
    listener: Listener
    asked: Asked
    patience: Patience = field(default_factory=Patience)
    ranks: range | None = None
    """Those of this host, where others write into the same folder; None: all."""
    reads_records: bool = True
    """Whether rank 0 is among them."""
    _spare: frozenset[int] = frozenset()
    _last: Record | None = None
    _answered: int = 0
    _deadline: float | None = None
    _killed: bool = False

    def run(self) -> Ending:
        """Start, watch, clean up.

        Raises:
            LaunchError: the command cannot be started at all.
        """
        self._spare = frozenset(process.pid for process in processes.descendants())
        runfolder.set_aside_failures(self.run_folder, ranks=self.ranks)
        log = self.run_folder.starter_log
        written = runfolder.sizes(self.run_folder.logs)
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
            file.seek(written.get(log.name, 0))
            printed = file.read().decode(errors="replace")
        return Ending(
            status=process.returncode,
            last=self._last,
            log=printed,
            rank_logs={
                rank: diagnosis.tail(path, start=written.get(path.name, 0))
                for rank, path in self.run_folder.rank_logs(self.ranks).items()
            },
            ended_here=self._killed,
        )

    def failures(self) -> list[dict[str, Any]]:
        """What failed ranks of this host have left in this attempt, the earliest first."""
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
        """Pass a request to end on: first a polite one to the ranks alone, then the end of everything."""
        if self.asked.count == self._answered:
            return
        self._answered = self.asked.count
        if self._answered > 1:
            self._kill()
            return
        again = "press Ctrl-C again" if self.asked.first == signal.SIGINT else "send SIGTERM again"
        self.listener.note(f"saving and ending ... ({again} to end at once)")
        # The ranks, not their starter: it would end them, and their loader processes, after a time of its own.
        ranks = processes.children_with(leader, _worker_arguments(self.command)) if self.starts_ranks else []
        processes.send(ranks or processes.by_id(leader), signal.SIGTERM)

    def _stop_after_failure(self) -> None:
        """Once a rank has failed the others have ``failure_s`` to end; a collective may block them for ever."""
        if self._deadline is None:
            if diagnosis.real(self.failures()):
                self._deadline = time.monotonic() + self.patience.failure_s
        elif time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        """End everything of this attempt at once."""
        self._killed = True
        processes.end_all(spare=self._spare, grace_s=0.0)


def _worker_arguments(command: Command) -> Sequence[str]:
    """What the ranks' own command line ends with."""
    return command.argv[list(command.argv).index("--run-dir") :] if "--run-dir" in command.argv else command.argv[-1:]
