"""What the process that watches the ranks of a host sees of them, and what they answer when they are asked where they are."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.jobs.watch import places
from mtrain.jobs.watch.looks import HostLooks
from mtrain.system import attempts
from mtrain.system.build_locks import find_locks
from mtrain.system.runfolder import RunFolder


@dataclass(kw_only=True)
class Eyes:
    """The watched ranks of a host."""

    run: RunFolder
    ranks: range
    starter: int
    """The process of the host's command."""
    environ: Mapping[str, str]
    """Its environment."""
    sizes: Mapping[str, int]
    """Sizes of the logs before it."""
    counts_output: bool
    """Whether what ranks print is progress."""
    _answers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._logs = [self.run.rank_log(rank) for rank in self.ranks]
        self._looks = HostLooks(
            ranks=self.ranks,
            starter=self.starter,
            pids=self._pids,
            outputs=[*self._logs, self.run.starter_log] if self.counts_output else [],
            locks=lambda: find_locks(self.environ),
        )

    def _pids(self) -> dict[int, tuple[int, ...]]:
        return attempts.read_ranks(self.run.path, self.run.node)

    def events(self) -> list[dict[str, Any]]:
        """Return the new events: what is seen, and what was answered."""
        look = self._looks.look()
        answers, self._answers = self._answers, []
        return [*([] if look is None else [look]), *answers]

    def ask(self, number: int) -> None:
        """Ask the ranks where they are; the answer is an event."""
        # In a thread: one that does not answer is waited for, and meanwhile the host must be heard.
        threading.Thread(target=self._ask, args=(number,), name="places of the ranks", daemon=True).start()

    def _ask(self, number: int) -> None:
        found: dict[str, Any] = {}
        error = ""
        try:
            pids = {rank: entry[0] for rank, entry in self._pids().items()}
            idle = {rank: look.idle for rank, look in self._looks.last.items()}
            found = places.ask(pids, idle=idle, children=self._looks.children())
        except Exception as failure:  # A watch that fails must not end the job.
            error = f"{type(failure).__name__}: {failure}"
        answer = {"event": "places", "ask": number, "places": found, "missing": self.missing_ranks()}
        self._answers.append({**answer, "error": error} if error else answer)

    def missing_ranks(self) -> list[int]:
        """Return the ranks that do not come as Horovod says, which only the first rank of all is told."""
        log = self._logs[0] if self._logs else Path()
        return places.missing_ranks(log, start=self.sizes.get(log.name, 0))
