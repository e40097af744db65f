"""One attempt of a job on all its hosts: start the commands, watch the hosts, end everything after a failure."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.cluster.channel import Message
from mtrain.cluster.disconnection import Disconnection
from mtrain.cluster.hosts import Member
from mtrain.errors import Interrupted
from mtrain.jobs.plan import Plan
from mtrain.report.console import Display
from mtrain.report.history import Record
from mtrain.system import diagnosis, processes
from mtrain.system.diagnosis import Evidence, Log, Verdict

SUSPECT_S = 4.0
"""A host that has been silent for this many seconds when a rank elsewhere fails is taken for the cause of the
failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long the leader waits, in seconds."""

    silence_s: float
    """After this silence, the leader gives up a host, and the agent of a host gives up the leader."""
    settle_s: float = 4.0
    """After the first failure, the hosts may report failures of their ranks for this long; then all are ended."""
    known_s: float = 0.5
    """The same after a rank was killed. That is the cause for certain, since failures of other ranks kill no rank."""
    ending_s: float = 6.0
    """How long agents may take to end everything and report it."""
    straggling_s: float = 60.0
    """How long other hosts may take to end once one has ended with 0, or once ranks were asked to end."""
    poll_s: float = 0.05
    """Pause between two looks at the hosts."""

    @classmethod
    def of(cls, failure_timeout_s: float) -> "Limits":
        """Derive limits from ``cluster.failure_timeout_s``, within which silence is noticed and everything is ended."""
        ending = min(15.0, failure_timeout_s / 4)
        return cls(
            silence_s=failure_timeout_s - ending,
            settle_s=min(4.0, ending),
            ending_s=min(6.0, ending),
            straggling_s=failure_timeout_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A host whose connection has ended before its command was reported to have ended."""

    at: float
    """When the leader noticed it, in monotonic time."""
    why: Disconnection
    last_heard: float
    """When the last byte came from the host, in seconds since 1970."""


@dataclass(kw_only=True)
class Outcome:
    """The events of an attempt, and the verdict on it once it is over. Hosts are keyed by their index."""

    plan: Plan
    members: Mapping[int, Member]
    last: Record | None = None
    """The record of kind "end", where rank 0 wrote one."""
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

    def judge(self) -> Verdict:
        """Return why the attempt failed: an agent's error, else a lost host, else a killed starter, else a rank."""
        for node, message in self.ended.items():
            if message.get("error"):
                text = f"{self.members[node].label}: {message['error']}"
                return Verdict(code=1, headline=text, text=f"error: {text}")
        lost_node = self._lost_node()
        if lost_node is not None:
            return self._verdict_on_lost_host(lost_node)
        return self._verdict_on_killed_starter() or diagnosis.conclude(self._evidence())

    def killed_starters(self) -> list[int]:
        """Return the hosts whose command was killed by something outside the job."""
        return [
            node
            for node, message in self.ended.items()
            if diagnosis.was_killed(
                int(message["status"]), ended_here=message["told"] or bool(message.get("ended_here"))
            )
        ]

    def _verdict_on_killed_starter(self) -> Verdict | None:
        """Return the verdict where a host's command was killed from outside, else None.

        Errors of ranks then follow from it.
        """
        for node in self.killed_starters():
            message = self.ended[node]
            log = self._starter_log(node, message)
            return diagnosis.of_killed_starter(int(message["status"]), log, host=self.members[node].label)
        return None

    def _lost_node(self) -> int | None:
        """Return the host whose loss is the cause: the first one lost that had no failed rank before."""
        failures = self.real_failures()
        for node, loss in sorted(self.lost.items(), key=lambda item: item[1].at):
            if not any(self._node_of(failure["rank"]) == node and failure["when"] < loss.at for failure in failures):
                return node
        return max(self.suspects, key=lambda node: self.suspects[node]) if self.suspects else None

    def _verdict_on_lost_host(self, node: int) -> Verdict:
        member, loss = self.members[node], self.lost.get(node)
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
        lines = [f"{its_ranks} ran there; log: {member.label}:{self._log_path(ranks[0])}"]
        for failure in self.real_failures()[:1]:
            rank = failure["rank"]
            lines += [
                f"then rank {rank} on {self._host_of(rank)} failed: {failure.get('error')}",
                f"log: {self._log(rank).place}",
            ]
        lines.append(f"error: {head}")
        return Verdict(code=1, headline=head, text="\n".join(lines))

    def _evidence(self) -> Evidence:
        """Collect what the diagnosis of failed ranks needs.

        The command that ended with an error first speaks for all.
        """
        deaths = [
            death
            for message in self.ended.values()
            for death in self.plan.launcher.deaths(str(message["log"]), int(message["status"]))
        ]
        failed = sorted(
            ((message["when"], node, message) for node, message in self.ended.items() if message["status"]),
            key=lambda item: item[:2],
        )
        nothing: Message = {"status": 1, "log": ""}
        _, node, first = failed[0] if failed else (0.0, 0, nothing)
        return Evidence(
            failures=self.real_failures(),
            deaths=sorted(set(deaths)),
            status=int(first["status"]),
            log=self._log,
            starter=self._starter_log(node, first),
            host=self._host_of,
            full=next(
                (
                    f"{self.members[node].label}:{self.plan.run_dir}"
                    for node in self.ended
                    if self.ended[node].get("full")
                ),
                "",
            ),
        )

    def _starter_log(self, node: int, ended: Message) -> Log:
        text = diagnosis.starter_excerpt(str(ended["log"]))
        return Log(place=f"{self.members[node].label}:{self._logs() / f'host-{node}.log'}", text=text)

    def _log(self, rank: int) -> Log:
        node = self._node_of(rank)
        text = str(self.ended.get(node, {}).get("logs", {}).get(str(rank), ""))
        return Log(place=f"{self.members[node].label}:{self._log_path(rank)}", text=text)

    def _logs(self) -> Any:
        return self.plan.log_dir or self.plan.run_dir / "logs"

    def _log_path(self, rank: int) -> Any:
        return self._logs() / f"rank-{rank}.log"

    def _host_of(self, rank: int) -> str:
        """Return the label of the host on which a rank ran."""
        return self.members[self._node_of(rank)].label

    def _node_of(self, rank: int) -> int:
        return next((node for node in self.members if rank in self._ranks(node)), 0)

    def _ranks(self, node: int) -> range:
        first = self.plan.first_rank(node)
        return range(first, first + self.plan.hosts[node].slots)


@dataclass(kw_only=True)
class Round:
    """Runs one attempt of a job on all its hosts."""

    plan: Plan
    members: Mapping[int, Member]
    """The hosts, by index."""
    display: Display
    requests: processes.Requests
    """Signals that ask this process to end the job."""
    limits: Limits
    forwarded: Mapping[str, str]
    """Environment variables that are sent to every host."""
    last_words: Callable[[int], str]
    """See ``Gathering``."""
    _answered: int = 0
    """How many of ``requests`` have been passed on to the hosts."""
    _deadline: float = float("inf")
    """When everything is ended, in monotonic time."""
    _final: float = float("inf")
    """When hosts that have not reported their end are no longer waited for, in monotonic time."""
    _ending: bool = False
    """Whether all hosts were told to end."""

    def run(self) -> Outcome:
        """Start the command on every host, and watch until all have ended or were lost."""
        self._outcome = Outcome(plan=self.plan, members=self.members)
        for node, member in self.members.items():
            member.channel.silence_s = self.limits.silence_s
            member.channel.send(self._orders(node, member))
        while not self._over():
            for node in self._open():
                self._hear(node)
            self._answer()
            self._decide()
            self.display.tick()
            time.sleep(self.limits.poll_s)
        return self._outcome

    def _orders(self, node: int, member: Member) -> Message:
        command = self.plan.commands[node]
        return {
            "do": "start",
            "host": member.host,
            "argv": list(command.argv),
            "env": dict(command.env),
            "forwarded": dict(self.forwarded),
            "starts_ranks": self.plan.launcher.agent,
            "first_rank": self.plan.first_rank(node),
            "ranks": self.plan.hosts[node].slots,
            "silence_s": self.limits.silence_s,
            "failure_s": self.limits.settle_s + self.limits.ending_s,
        }

    def _open(self) -> Sequence[int]:
        """Return the hosts whose command may still run: they have neither reported its end nor been lost."""
        outcome = self._outcome
        return [node for node in self.members if node not in outcome.ended and node not in outcome.lost]

    def _hear(self, node: int) -> None:
        """Handle the events of a host, and note where it was lost."""
        channel, now = self.members[node].channel, time.monotonic()
        # Read before the inbox is emptied: once the channel has ended, the inbox is known to hold all there will ever
        # be.
        disconnection = channel.lost
        for message in channel.receive():
            self._take(node, message, now)
        if disconnection is not None and node not in self._outcome.ended:
            # The process that connects a silent host has not ended, and waiting for its end would take time.
            words = "" if disconnection.is_silence else self.last_words(node)
            self._outcome.words[node] = words
            self._outcome.lost[node] = Loss(at=now, why=disconnection, last_heard=time.time() - channel.silent_s)

    def _take(self, node: int, message: Message, now: float) -> None:
        event = message.get("event")
        if event == "record":
            self._record(message["record"])
        elif event == "failure":
            self._outcome.failures.append({**message["failure"], "when": now - float(message["age_s"])})
        elif event == "ended":
            deaths = self.plan.launcher.deaths(str(message["log"]), int(message["status"]))
            killed = any(code == -signal.SIGKILL for _, code in deaths)
            self._outcome.ended[node] = {**message, "when": now, "told": self._ending, "killed": killed}
            self._outcome.summary = self._outcome.summary or message.get("summary")
        elif event == "asked":
            heed(message, self.members[node], self.requests, self.display)

    def _record(self, record: Record) -> None:
        if record.get("kind") == "end":
            self._outcome.last = record
        self.display.record(record)

    def _answer(self) -> None:
        """Pass signals on to all hosts: the first asks the ranks to save and end, the second ends all at once."""
        if self.requests.count == self._answered:
            return
        self._answered = self.requests.count
        first = self.requests.first or signal.SIGTERM
        if self._answered > 1:
            self._end_all()
            return
        again = "press Ctrl-C again" if first == signal.SIGINT else "send SIGTERM again"
        self.display.note(f"saving and ending ... ({again} to end at once)")
        for node in self._open():
            self.members[node].channel.send({"do": "stop", "signal": int(first)})

    def _decide(self) -> None:
        """End everything once something has failed and the hosts have had time to report what they know."""
        now = time.monotonic()
        wait = self._patience()
        if wait is not None:
            self._deadline = min(self._deadline, now + wait)
            if wait <= self.limits.settle_s and not self._outcome.suspects and not self._ending:
                silent = {node: self.members[node].channel.silent_s for node in self._open()}
                self._outcome.suspects = {node: s for node, s in silent.items() if s > SUSPECT_S}
        if now > self._deadline and not self._ending:
            self._end_all()

    def _patience(self) -> float | None:
        """Return how many seconds the other hosts have from now on; None: no host has failed or ended yet."""
        outcome = self._outcome
        if any(loss.why.is_silence for loss in outcome.lost.values()):
            return 0.0
        if any(message["killed"] and not message["told"] for message in outcome.ended.values()):
            return min(self.limits.known_s, self.limits.settle_s)
        if outcome.lost or diagnosis.real(outcome.failures):
            return self.limits.settle_s
        statuses = [int(message["status"]) for message in outcome.ended.values()]
        end_requested = self.requests.count > 0 or any(
            failure.get("exit_code") == Interrupted.exit_code for failure in outcome.failures
        )
        if any(statuses) and not end_requested:
            return self.limits.settle_s
        return self.limits.straggling_s if statuses else None

    def _end_all(self) -> None:
        self._ending = True
        self._final = time.monotonic() + self.limits.ending_s
        for node in self._open():
            self.members[node].channel.send({"do": "end"})

    def _over(self) -> bool:
        return not self._open() or time.monotonic() > self._final


def heed(message: Message, member: Member, requests: processes.Requests, display: Display) -> None:
    """Count and show a signal to end the job that another host has received and reported with an "asked" event."""
    requests.take(
        signal.Signals(int(message["signal"])), place=f"host {member.node}", times=int(message.get("times", 1))
    )
    display.note(f"{member.label} was asked to end the job")
