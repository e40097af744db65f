"""The events of one attempt of a job, and the verdict on it once it is over."""

import bisect
import functools
import itertools
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.jobs.hosts.disconnection import Disconnection
from mtrain.jobs.hosts.hosts import Participant
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.watch.report import Report
from mtrain.jobs.watch.watch import TIMEOUT
from mtrain.records.history import Record
from mtrain.system import diagnosis
from mtrain.system.diagnosis import Evidence, Log, Verdict
from mtrain.system.runfolder import RunFolder

NOTICED_S = 5.0
"""Seconds within which a process that goes on notices which hosts have closed their connections meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A host whose connection has ended before its command was reported to have ended."""

    at: float
    """When the leader noticed it, in monotonic time."""
    why: Disconnection
    last_heard: float
    """When the last byte came from the host, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A time in which the process that leads the job did not run, because it was stopped."""

    seconds: float
    until: float
    """When it went on, in monotonic time."""

    def explains(self, loss: Loss) -> bool:
        """Return whether a host was lost because it had given up this process."""
        return not loss.why.is_silence and 0 <= loss.at - self.until < NOTICED_S


@dataclass(kw_only=True)
class Outcome:
    """The events of an attempt, and the verdict on it once it is over. Hosts are keyed by their index."""

    plan: Plan
    members: Mapping[int, Participant]
    last: Record = field(default_factory=dict)
    """The record of kind "end"; empty where rank 0 wrote none."""
    summary: Mapping[str, Any] | None = None
    """The run's summary, where it came to an end."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The failure files of ranks, with ``when`` added: the time of the failure in this process's monotonic time."""
    ended: dict[int, Message] = field(default_factory=dict)
    """By host: its "ended" event, with ``when``; ``told``: whether it was told to end; ``killed``: whether a rank was
    killed."""
    lost: dict[int, Loss] = field(default_factory=dict)
    """By host: how it was lost."""
    suspects: dict[int, float] = field(default_factory=dict)
    """By host: for how many seconds it had been silent when the first failure was reported."""
    grace_s: float | None = None
    """The seconds after SIGTERM after which ranks that still ran were ended; None: none were ended for that."""
    hang: Report | None = None
    """The ranks that hung, where that has ended the attempt; None: it has not, or they are not known."""
    hung_s: float | None = None
    """The seconds after which the attempt was ended for it; None: a rank's own patience has ended."""
    reformed: str = ""
    """Why the ranks were asked to save, for the job to start again on other hosts; "": they were not."""
    started_at: float | None = None
    """When rank 0 has told that it begins to train, in monotonic time; None: it has not."""
    has_updated: bool = False
    """Whether an update of this attempt was recorded."""
    saved: int = -1
    """Update of the newest checkpoint that is known to be complete; -1: none. The next one was begun after it."""
    begun: int = -1
    """Update of the newest checkpoint that rank 0 has begun to write; -1: none."""
    pause: Pause | None = None
    """The last time in which this process did not run, where that was long enough for hosts to give it up."""
    words: dict[int, str] = field(default_factory=dict)
    """By lost host: how the process that connected it ended, "" where that is unknown."""

    @property
    def ok(self) -> bool:
        """Return whether every host's command ended with 0."""
        return len(self.ended) == len(self.members) and not any(message["status"] for message in self.ended.values())

    def unheard(self) -> list[str]:
        """Return the hosts that may still run ranks, since no request to end them can have reached the agent."""
        return [
            member.label
            for node, member in self.members.items()
            if node not in self.ended and (node not in self.lost or self.lost[node].why.is_silence)
        ]

    def real_failures(self) -> list[dict[str, Any]]:
        """Return the failures in the order of time, without those of ranks that were asked to end."""
        return sorted(diagnosis.real(self.failures), key=lambda failure: (failure["when"], failure.get("rank", 0)))

    def first_failure(self) -> dict[str, Any] | None:
        """Return the first failure; where no rank could write one, as when a library ends it in C++, the time-out in its log."""
        failures = self.real_failures()
        if failures:
            return failures[0]
        found = []
        for rank, code in self._deaths():
            if code != -signal.SIGTERM:  # which a starter sends to the others
                lines = [line.strip() for line in self._log(rank).text.splitlines() if TIMEOUT.search(line)]
                found.append({"rank": rank, "error": lines[-1]} if lines else None)
        return None if None in found else next(iter(found), None)

    def judge(self) -> Verdict:
        """Return why the attempt failed: an agent's error, else a lost host, else a killed starter, else a rank."""
        # A command that never ran explains everything that others say of its ranks.
        for node, message in self.ended.items():
            if message.get("error"):
                text = f"{self.members[node].label}: {message['error']}"
                return Verdict(code=1, headline=text, text=f"error: {text}")
        lost_node = self._lost_node()
        if lost_node is not None:
            return self._verdict_on_lost_host(lost_node)
        # Ranks of a starter that was killed report broken connections, which follow from it.
        return self._verdict_on_killed_starter() or self._verdict_on_hang() or diagnosis.conclude(self._evidence())

    def killed_starters(self) -> list[int]:
        """Return the hosts whose command was killed by something outside the job."""
        return [
            node
            for node, message in self.ended.items()
            if self.plan.launcher.agent  # else the command is itself the rank
            and diagnosis.was_killed(
                int(message["status"]), ended_here=message["told"] or bool(message.get("ended_here"))
            )
        ]

    def _verdict_on_killed_starter(self) -> Verdict | None:
        """Return the verdict where a host's command was killed from outside, else None."""
        for node in self.killed_starters():
            message = self.ended[node]
            log = self._starter_log(node, message)
            return diagnosis.of_killed_starter(int(message["status"]), log, host=self.members[node].label)
        return None

    def _verdict_on_hang(self) -> Verdict | None:
        """Return the verdict where a hang has ended the attempt, else None."""
        hang = self.hang
        if hang is None:
            return None
        if self.hung_s is not None:
            head = f"{hang.text}; ended after {self.hung_s:g} s (cluster.hangs.end_s)"
            return Verdict(code=1, headline=head, text=f"error: {head}", from_outside=True)
        first = self.first_failure() or {}
        rank = int(first.get("rank", 0))
        host = self._host_of(rank)
        waited = f"rank {rank}{f' on {host}' if host else ''}"
        head = f"{hang.cause}; {waited} has waited in vain, and failed: {first.get('error')}"
        text = f"{diagnosis.conclude(self._evidence()).text}\nerror: {head}"
        return Verdict(code=1, headline=head, text=text, error=head, from_outside=True)

    def hung_nodes(self) -> list[int]:
        """Return the hosts whose ranks alone were the cause of a hang that has ended the attempt."""
        return sorted({self._node_of(rank) for rank in self.hang.suspects if rank >= 0}) if self.hang else []

    def _lost_node(self) -> int | None:
        """Return the host whose loss is the cause: the first one lost that had no failed rank before."""
        # Of a host that was lost after one of its ranks had failed, the failure is the cause.
        first_failure: dict[int, float] = {}
        for failure in self.real_failures():
            first_failure.setdefault(self._node_of(failure["rank"]), failure["when"])
        for node, loss in sorted(self.lost.items(), key=lambda item: item[1].at):
            if first_failure.get(node, float("inf")) >= loss.at:
                return node
        return max(self.suspects, key=lambda node: self.suspects[node]) if self.suspects else None

    def _verdict_on_lost_host(self, node: int) -> Verdict:
        member, loss = self.members[node], self.lost.get(node)
        if loss is not None and self.pause is not None and self.pause.explains(loss):
            return _verdict_on_pause(self.pause)
        if loss is None or loss.why.is_silence:  # without a loss, the host is only suspected: see `suspects`
            silent_s = self.suspects[node] if loss is None else loss.why.silent_s
            heard_at = time.time() - self.suspects[node] if loss is None else loss.last_heard
            head = (
                f"host {member.label} has been silent for {silent_s:.0f} s: network or power; "
                f"last heard at {time.strftime('%H:%M:%S', time.localtime(heard_at))}"
            )
        else:
            words = self.words.get(node)
            head = f"host {member.label} is lost: {loss.why}" + (f" ({words})" if words else "")
        ranks = self._ranks(node)
        its_ranks = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        lines = [f"{its_ranks} ran there; log: {self._place(node, self._files(node).rank_log(ranks[0]))}"]
        for failure in self.real_failures()[:1]:
            rank = failure["rank"]
            lines += [
                f"then rank {rank} on {self._host_of(rank)} failed: {failure.get('error')}",
                f"log: {self._log(rank).place}",
            ]
        lines.append(f"error: {head}")
        return Verdict(code=1, headline=head, text="\n".join(lines), from_outside=True)

    def _deaths(self) -> list[tuple[int, int]]:
        """Return (rank, exit status) of each failed rank, as the starters report them."""
        deaths = self.plan.launcher.deaths
        return sorted(
            {each for ended in self.ended.values() for each in deaths(str(ended["log"]), int(ended["status"]))}
        )

    def _evidence(self) -> Evidence:
        """Collect what the diagnosis of failed ranks needs."""
        failed = sorted(
            ((message["when"], node, message) for node, message in self.ended.items() if message["status"]),
            key=lambda item: item[:2],
        )
        # The command that ended with an error first speaks for all: the others follow when its ranks are gone.
        nothing: Message = {"status": 1, "log": ""}
        _, node, first = failed[0] if failed else (0.0, 0, nothing)
        return Evidence(
            failures=self.real_failures(),
            deaths=self._deaths(),
            status=int(first["status"]),
            log=self._log,
            starter=self._starter_log(node, first),
            host=self._host_of,
            full=next(
                (self._place(node, self.plan.run_dir) for node in self.ended if self.ended[node].get("full")), ""
            ),
        )

    def _starter_log(self, node: int, ended: Message) -> Log:
        text = diagnosis.starter_excerpt(str(ended["log"])[-diagnosis.LOG_BYTES :])
        return Log(place=self._place(node, self._files(node).starter_log), text=text)

    def _log(self, rank: int) -> Log:
        node = self._node_of(rank)
        text = str(self.ended.get(node, {}).get("logs", {}).get(str(rank), ""))
        return Log(place=self._place(node, self._files(node).rank_log(rank)), text=text)

    def _files(self, node: int) -> RunFolder:
        """Return the paths of the run's files on a host."""
        return RunFolder(self.plan.run_dir, self.plan.log_dir, node=self.members[node].node)

    def _place(self, node: int, path: Path) -> str:
        """Return where a file is, for messages: with its host, unless the job has only this one."""
        label = self.members[node].label
        return f"{label}:{path}" if label else str(path)

    def _host_of(self, rank: int) -> str:
        """Return the label of the host on which a rank ran."""
        return self.members[self._node_of(rank)].label

    def _node_of(self, rank: int) -> int:
        """Return the host of a rank; of one that no host has, the first."""
        node = bisect.bisect_right(self._first_ranks, rank) - 1
        return node if node in self.members and rank in self._ranks(node) else 0

    def _ranks(self, node: int) -> range:
        first = self._first_ranks[node]
        return range(first, first + self.plan.hosts[node].slots)

    @functools.cached_property
    def _first_ranks(self) -> Sequence[int]:
        """Return the lowest rank of each host of the plan. When a host of many is lost, all ranks of the others fail."""
        return [0, *itertools.accumulate(host.slots for host in self.plan.hosts)][: len(self.plan.hosts)]


def _verdict_on_pause(pause: Pause) -> Verdict:
    head = (
        f"the process that leads the job stood still for {pause.seconds:.0f} s (it was suspended, or its host was), and the "
        "other hosts ended the job without it; suspend all hosts of a job together, as scontrol suspend does, or give a longer "
        "--failure-timeout-s"
    )
    return Verdict(code=1, headline=head, text=f"error: {head}")
