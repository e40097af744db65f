"""One attempt of a job on all its hosts: start everywhere, hear everyone, end everything everywhere at the first failure."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.cluster.channel import Message
from mtrain.cluster.hosts import Member
from mtrain.errors import Interrupted
from mtrain.jobs.plan import Plan
from mtrain.report.console import Display
from mtrain.report.history import Record
from mtrain.system import diagnosis, processes
from mtrain.system.diagnosis import Evidence, Log, Verdict

SUSPECT_S = 4.0
"""A host that has been silent for so long when a rank elsewhere fails is the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long to wait for what, in seconds."""

    silence_s: float
    """Without a word of a host, after which it is lost, to the leader as to its agent."""
    settle_s: float = 4.0
    """For others to tell, after the first failure, what they know; then all are ended."""
    known_s: float = 0.5
    """The same where a rank was killed: no failure of another rank does that."""
    ending_s: float = 6.0
    """For agents to say that all is ended."""
    straggling_s: float = 60.0
    """For the other hosts to end once one has ended well, or once ranks were asked to end."""
    poll_s: float = 0.05

    @classmethod
    def of(cls, failure_timeout_s: float) -> "Limits":
        """From ``cluster.failure_timeout_s``, within which a silent host is found and everything else is ended."""
        ending = min(15.0, failure_timeout_s / 4)
        return cls(
            silence_s=failure_timeout_s - ending,
            settle_s=min(4.0, ending),
            ending_s=min(6.0, ending),
            straggling_s=failure_timeout_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A host that is gone."""

    at: float
    """Monotonic time."""
    reason: str
    last_heard: float
    """Wall clock."""


@dataclass(kw_only=True)
class Outcome:
    """What is known of an attempt once it is over."""

    plan: Plan
    members: Mapping[int, Member]
    last: Record | None = None
    """The "end" record."""
    summary: Mapping[str, Any] | None = None
    failures: list[dict[str, Any]] = field(default_factory=list)
    """What failed ranks left, with ``when``, in this process's monotonic time."""
    ended: dict[int, Message] = field(default_factory=dict)
    """By host: its "ended" event, with ``when``, ``told``: whether it was told to end, and ``killed``: whether a rank was."""
    lost: dict[int, Loss] = field(default_factory=dict)
    suspects: dict[int, float] = field(default_factory=dict)
    """By host: seconds of its silence when the first failure was told."""
    words: dict[int, str] = field(default_factory=dict)
    """By lost host: what its connection said at its end."""

    @property
    def ok(self) -> bool:
        """Whether every host's command ended with 0."""
        return len(self.ended) == len(self.members) and not any(message["status"] for message in self.ended.values())

    def unheard(self) -> list[str]:
        """Hosts that may still have processes of the attempt: nobody there could be told to end them."""
        return [
            member.label
            for node, member in self.members.items()
            if node not in self.ended and (node not in self.lost or self.lost[node].reason.startswith("silent"))
        ]

    def real_failures(self) -> list[dict[str, Any]]:
        """Without those of ranks that were asked to end; the first one first."""
        return sorted(diagnosis.real(self.failures), key=lambda failure: (failure["when"], failure.get("rank", 0)))

    def judge(self) -> Verdict:
        """Why it failed."""
        for node, message in self.ended.items():
            if message.get("error"):
                text = f"{self.members[node].label}: {message['error']}"
                return Verdict(code=1, headline=text, text=f"error: {text}")
        absent = self._absent()
        if absent is not None:
            return self._of_absence(absent)
        return self._of_killed_starter() or diagnosis.conclude(self._evidence())

    def killed_starters(self) -> list[int]:
        """Hosts whose command was killed by something outside the job."""
        return [
            node
            for node, message in self.ended.items()
            if diagnosis.was_killed(
                int(message["status"]), ended_here=message["told"] or bool(message.get("ended_here"))
            )
        ]

    def _of_killed_starter(self) -> Verdict | None:
        """The verdict where something outside has killed the command of a host; what ranks then raise follows from it."""
        for node in self.killed_starters():
            message = self.ended[node]
            log = self._starter_log(node, message)
            return diagnosis.of_killed_starter(int(message["status"]), log, host=self.members[node].label)
        return None

    def _absent(self) -> int | None:
        """The host whose loss is the cause: the first that went, unless one of its own ranks had failed before."""
        failures = self.real_failures()
        for node, loss in sorted(self.lost.items(), key=lambda item: item[1].at):
            if not any(self._node_of(failure["rank"]) == node and failure["when"] < loss.at for failure in failures):
                return node
        return max(self.suspects, key=lambda node: self.suspects[node]) if self.suspects else None

    def _of_absence(self, node: int) -> Verdict:
        member, loss = self.members[node], self.lost.get(node)
        if loss is None or loss.reason.startswith("silent"):
            silent_s = self.suspects[node] if loss is None else time.time() - loss.last_heard
            heard = time.time() - self.suspects[node] if loss is None else loss.last_heard
            if loss is not None:
                silent_s = float(loss.reason.split()[2])
            head = (
                f"host {member.label} has been silent for {silent_s:.0f} s: network or power; "
                f"last heard at {time.strftime('%H:%M:%S', time.localtime(heard))}"
            )
        else:
            words = self.words.get(node)
            head = f"host {member.label} is lost: {loss.reason}" + (f" ({words})" if words else "")
        ranks = self._ranks(node)
        named = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        lines = [f"{named} ran there; log: {member.label}:{self._log_path(ranks[0])}"]
        for failure in self.real_failures()[:1]:
            rank = failure["rank"]
            lines += [
                f"then rank {rank} on {self._host_of(rank)} failed: {failure.get('error')}",
                f"log: {self._log(rank).place}",
            ]
        lines.append(f"error: {head}")
        return Verdict(code=1, headline=head, text="\n".join(lines))

    def _evidence(self) -> Evidence:
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
        return self.members[self._node_of(rank)].label

    def _node_of(self, rank: int) -> int:
        return next((node for node in self.members if rank in self._ranks(node)), 0)

    def _ranks(self, node: int) -> range:
        first = self.plan.first_rank(node)
        return range(first, first + self.plan.hosts[node].slots)


@dataclass(kw_only=True)
class Round:
    """Runs one attempt."""

    plan: Plan
    members: Mapping[int, Member]
    display: Display
    requests: processes.Requests
    limits: Limits
    forwarded: Mapping[str, str]
    last_words: Callable[[int], str]
    """See ``Gathering``."""
    _answered: int = 0
    _deadline: float = float("inf")
    _final: float = float("inf")
    _ending: bool = False

    def run(self) -> Outcome:
        """Start on every host, and watch to the end of all."""
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
        done = self._outcome
        return [node for node in self.members if node not in done.ended and node not in done.lost]

    def _hear(self, node: int) -> None:
        channel, now = self.members[node].channel, time.monotonic()
        reason = channel.lost  # looked at first: what it said before its end is then in the inbox
        for message in channel.receive():
            self._take(node, message, now)
        if reason is not None and node not in self._outcome.ended:
            words = "" if reason.startswith("silent") else self.last_words(node)
            self._outcome.words[node] = words
            self._outcome.lost[node] = Loss(at=now, reason=reason, last_heard=time.time() - channel.silent_s)

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
        """Pass a request to end on to all hosts: first a polite one, then the end of everything."""
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
        """End everything once something has failed and everyone has had the time to tell of it."""
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
        """Seconds for the rest of the hosts, from now; None: nothing has happened."""
        done = self._outcome
        if any(loss.reason.startswith("silent") for loss in done.lost.values()):
            return 0.0
        if any(message["killed"] and not message["told"] for message in done.ended.values()):
            return min(self.limits.known_s, self.limits.settle_s)
        if done.lost or diagnosis.real(done.failures):
            return self.limits.settle_s
        statuses = [int(message["status"]) for message in done.ended.values()]
        asked = self.requests.count > 0 or any(
            failure.get("exit_code") == Interrupted.exit_code for failure in done.failures
        )
        if any(statuses) and not asked:
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
    """Count a request to end that was made at another host and passed on as its "asked" event."""
    requests.take(
        signal.Signals(int(message["signal"])), place=f"host {member.node}", times=int(message.get("times", 1))
    )
    display.note(f"{member.label} was asked to end the job")
