"""One attempt of a job on all its hosts: start the commands, watch the hosts, end everything after a failure."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mtrain.errors import Interrupted
from mtrain.jobs.hosts.host_log import HostLog
from mtrain.jobs.hosts.hosts import Participant
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.run.outcome import Loss, Outcome, Pause
from mtrain.jobs.watch.watch import Watch
from mtrain.records.display import Display
from mtrain.records.history import Record
from mtrain.system import diagnosis, processes

SAME_SAVE_S = 5.0
"""Seconds in which requests to save, at whatever hosts, are one."""
MOST_NOTED = 3
"""Most other hosts that are named of those at which somebody has asked for the end of the job."""
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
    leftover_s: float = 1.0
    """How long processes of a host may take to end after their starter has ended, before they are killed."""
    grace_s: float = 20.0
    """How long ranks have after SIGTERM to collect their state, and to end once it is written: ``cluster.grace_s``."""

    @classmethod
    def of(cls, failure_timeout_s: float, *, grace_s: float) -> "Limits":
        """Derive limits from ``cluster.failure_timeout_s``, within which silence is noticed and everything is ended."""
        ending = min(15.0, failure_timeout_s / 4)
        return cls(
            silence_s=failure_timeout_s - ending,
            settle_s=min(4.0, ending),
            ending_s=min(6.0, ending),
            straggling_s=failure_timeout_s,
            grace_s=grace_s,
        )


@dataclass(kw_only=True)
class Attempt:
    """Runs one attempt of a job on all its hosts."""

    plan: Plan
    members: Mapping[int, Participant]
    """The hosts, by index."""
    display: Display
    requests: processes.Requests
    """Signals that ask this process to end the job."""
    limits: Limits
    restarts: int = 0
    """How many attempts of the job came before this one."""
    forwarded: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are sent to every host."""
    last_words: Callable[[int], str] = lambda node: ""
    """See ``Gathering``."""
    reform: Callable[[Outcome], str] = lambda outcome: ""
    """Returns, from what has happened, why the job is to be saved now and started again on other hosts, in words; "" while it is not."""
    leaves: Callable[[int], bool] = lambda node: False
    """Returns whether a host that was asked to end leaves the job, which goes on without it; else the job ends."""
    _answered: int = 0
    """How many of ``requests`` have been passed on to the hosts."""
    _saves_passed_on: int = 0
    """How many requests to save have been passed on to the hosts."""
    _save_asked_at: float = float("-inf")
    """When the ranks were last asked to save, in monotonic time."""
    _deadline: float = float("inf")
    """When everything is ended, in monotonic time."""
    _grace_ends: float = float("inf")
    """When ranks that were asked to end with SIGTERM are ended, in monotonic time."""
    _writing: bool = False
    """Whether the ranks have collected their last state, and rank 0 is writing it."""
    _final: float = float("inf")
    """When hosts that have not reported their end are no longer waited for, in monotonic time."""
    _ending: bool = False
    """Whether all hosts were told to end."""
    _watch: Watch | None = None
    """What is known of ranks that hang."""

    def run(self) -> Outcome:
        """Start the command on every host, and watch until all have ended or were lost."""
        self._outcome = Outcome(plan=self.plan, members=self.members)
        # A request to save from before the ranks start is answered by nobody, and the attempt begins from what is saved.
        self._saves_passed_on = self.requests.saves
        self._host_log = HostLog(self.plan.run_dir)
        if len(self.members) > 1:
            self._host_log.began([member.label for member in self.members.values()], restarts=self.restarts)
        for node, member in self.members.items():
            member.channel.silence_s = self.limits.silence_s
            member.channel.send(self._orders(node, member))
        self._watch = self._make_watch()
        turned_at = time.monotonic()
        while True:
            turned_at = self._note_pause(turned_at)
            self._answer()
            for node in self._open():
                self._hear(node)
            if not self._open() or time.monotonic() > self._final:
                self._explain()
                return self._outcome
            self._pass_on_saves()
            self._reform()
            self._watch_ranks()
            self._decide()
            self.display.tick()
            time.sleep(self.limits.poll_s)

    def _note_pause(self, turned_at: float) -> float:
        """Note a time in which this process did not run, and the hosts could hear nothing from it; return the time now."""
        now = time.monotonic()
        # Hosts give this process up after ``silence_s`` without a message. Half of it is certainly no slow turn of the loop.
        if now - turned_at > self.limits.silence_s / 2:
            self._outcome.pause = Pause(seconds=now - turned_at, until=now)
        return now

    def _orders(self, node: int, member: Participant) -> Message:
        command = self.plan.commands[node]
        return {
            "do": "start",
            "host": command.host,
            "argv": list(command.argv),
            "env": dict(command.env),
            "forwarded": dict(self.forwarded),
            "starts_ranks": self.plan.launcher.agent,
            "first_rank": self.plan.first_rank(node),
            "ranks": self.plan.hosts[node].slots,
            "hosts": len(self.plan.hosts),
            "restarts": self.restarts,
            "silence_s": self.limits.silence_s,
            "failure_s": self.limits.settle_s + self.limits.ending_s,
            "log_bytes": self.plan.log_bytes,
            "launcher_logs": self.plan.launcher.own_logs(command),
            "knows_mtrain": self.plan.knows_mtrain,
            "forwards_signals": self.plan.launcher.forwards_signals,
            "shown": self.plan.shown,
            "watched": self.plan.watching is not None,
            "counts_output": self.plan.watching is not None and self.plan.watching.counts_output,
        }

    def _open(self) -> Sequence[int]:
        """Return the hosts whose command may still run: they have neither reported its end nor been lost."""
        outcome = self._outcome
        return [node for node in self.members if node not in outcome.ended and node not in outcome.lost]

    def _hear(self, node: int) -> None:
        """Handle the events of a host, and note where it was lost."""
        channel = self.members[node].channel
        # Read before the inbox is emptied: once the channel has ended, the inbox is known to hold all there will ever
        # be.
        disconnection = channel.lost
        messages, now = channel.receive(), time.monotonic()
        for message in messages:
            self._take(node, message, now)
        if disconnection is not None and node not in self._outcome.ended:
            # The process that connects a silent host has not ended, and waiting for its end would take time.
            words = "" if disconnection.is_silence else self.last_words(node)
            self._outcome.words[node] = words
            self._host_log.lost(self.members[node].label, str(disconnection))
            self._outcome.lost[node] = Loss(at=now, why=disconnection, last_heard=time.time() - channel.silent_s)

    def _take(self, node: int, message: Message, now: float) -> None:
        event = message.get("event")
        if event == "record":
            self._record(message["record"])
        elif event == "output":
            rank = int(message["rank"]) if self.plan.shown == "all" else None
            self.display.output(str(message["text"]).encode("latin-1"), rank=rank)
        elif event == "failure":
            # Clocks of hosts differ, so a host tells an age, and failures are ordered by this process's time.
            self._outcome.failures.append({**message["failure"], "when": now - float(message["age_s"])})
            if self._watch is not None and self._watch.fail(message["failure"]):
                self._ask_places()
        elif event in ("look", "places") and self._watch is not None:
            self._watch.take(node, message)
        elif event == "ended":
            deaths = self.plan.launcher.deaths(str(message["log"]), int(message["status"]))
            killed = any(code == -signal.SIGKILL for _, code in deaths)
            self._outcome.ended[node] = {**message, "when": now, "told": self._ending, "killed": killed}
            self._outcome.summary = self._outcome.summary or message.get("summary")
            if self._watch is not None:
                self._watch.take_missing(message.get("missing", ()))
        elif event == "save":
            self.requests.saves += 1
        elif event == "asked" and not self.leaves(node):
            note_request(message, self.members[node], self.requests, self.display)

    def _record(self, record: Record) -> None:
        if record.get("kind") == "start":
            self._outcome.started_at = time.monotonic()
        self._outcome.has_updated |= record.get("kind") == "update"
        if record.get("kind") == "checkpoint":
            # The record says that a save begins. That it is complete is known when the next one begins, or at the end.
            self._outcome.saved, self._outcome.begun = self._outcome.begun, int(record["update"])
            self._writing = self._writing or record.get("why") == "ending"
        if record.get("kind") == "end":
            if record.get("reason") != "failed":  # else a save in the background may have failed with the attempt
                self._outcome.saved = self._outcome.begun
            self._outcome.last, self._writing = record, False
        if self._watch is not None:
            self._watch.note_progress()
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
        # Whoever presses Ctrl-C can do so again; a scheduler kills before long, and a script may never end by itself.
        if first == signal.SIGTERM or not self.plan.knows_mtrain:
            self._grace_ends = time.monotonic() + self.limits.grace_s
        again = "press Ctrl-C again" if first == signal.SIGINT else "send SIGTERM again"
        what = (
            "saving and ending"
            if self.plan.saves
            else "ending"
            if self.plan.knows_mtrain
            else f"{first.name} for the ranks"
        )
        self.display.note(f"{what} ... ({again} to end at once)")
        self._send_all({"do": "stop", "signal": int(first)})

    def _reform(self) -> None:
        """Ask the ranks to save and end once the job is to go on with other hosts."""
        outcome = self._outcome
        # What fails ends the attempt anyway; ranks that were told to save meanwhile would wait for those that are gone.
        failing = outcome.lost or outcome.ended or diagnosis.real(outcome.failures)
        if outcome.reformed or failing or self._ending or self.requests.any():
            return
        outcome.reformed = self.reform(outcome)
        if outcome.reformed:
            how = "starting again, since nothing was made yet," if outcome.started_at is None else "saving, to go on"
            self.display.note(f"{outcome.reformed}: {how} with these hosts")
            self._grace_ends = time.monotonic() + self.limits.grace_s
            self._send_all({"do": "stop", "signal": int(signal.SIGTERM)})

    def _pass_on_saves(self) -> None:
        """Ask the ranks of all hosts to save and to go on if this process, or an agent, was asked to."""
        if self.requests.saves == self._saves_passed_on or self._ending or self.requests.any():
            return
        self._saves_passed_on = self.requests.saves
        now = time.monotonic()
        if now - self._save_asked_at < SAME_SAVE_S:  # A scheduler signals all hosts, and each of them passes it on.
            return
        self._save_asked_at = now
        self.display.note("SIGUSR1: the ranks were asked to save at the next update, and to go on")
        self._send_all({"do": "save"})

    # ------------------------------------------------------------------------------------------------------------- hangs
    def _make_watch(self) -> Watch | None:
        if self.plan.watching is None:
            return None
        firsts = {node: self.plan.first_rank(node) for node in self.members}
        return Watch(
            watching=self.plan.watching,
            ranks={node: range(first, first + self.plan.hosts[node].slots) for node, first in firsts.items()},
            labels={node: member.label for node, member in self.members.items()},
            clock=time.monotonic,
            wall=time.time,
        )

    def _watch_ranks(self) -> None:
        """Say which ranks hang, and end the job once that has lasted for too long."""
        watch, outcome = self._watch, self._outcome
        # Whatever ends, or is asked to, is waited for elsewhere.
        is_ending = self._ending or self.requests.any() or outcome.reformed or outcome.ended or outcome.lost
        if watch is None or is_ending or outcome.failures:
            return
        if watch.wants_places():
            self._ask_places()
        report = watch.find_report()
        if report is not None:
            self.display.note(report.text)
            self._send_all({"do": "hang", "report": report.as_json()})
        if watch.has_gone_on():
            self.display.note("the ranks go on")
            self._send_all({"do": "hang", "report": {"over": True}})
        if watch.is_over() and watch.report is not None:
            outcome.hang, outcome.hung_s = watch.report, watch.watching.end_s
            self._end_all()

    def _ask_places(self) -> None:
        if self._watch is not None:
            self._send_all(self._watch.ask(self._open()))

    def _send_all(self, message: Message) -> None:
        for node in self._open():
            self.members[node].channel.send(message)

    def _explain(self) -> None:
        """Find out which ranks did not come where the patience of one has ended."""
        first = self._outcome.first_failure()
        if self._watch is not None and self._outcome.hang is None and first is not None:
            self._outcome.hang = self._watch.explain(first)

    def _decide(self) -> None:
        """End everything once something has failed and the hosts have had time to report what they know."""
        now = time.monotonic()
        wait = self._patience()
        if wait is not None:
            self._deadline = min(self._deadline, now + wait)
            # A rank elsewhere fails some seconds before the silence of a lost host is long enough to count as its loss.
            if wait <= self.limits.settle_s and not self._outcome.suspects and not self._ending:
                silent = {node: self.members[node].channel.silent_s for node in self._open()}
                self._outcome.suspects = {node: s for node, s in silent.items() if s > SUSPECT_S}
        # Ranks that have collected their last state hang no longer, and writing it may take as long as the disk needs.
        if now > self._grace_ends and not self._ending and not self._writing:
            self._outcome.grace_s = self.limits.grace_s
            name = (self.requests.first or signal.SIGTERM).name
            self.display.note(
                f"ranks still run {self.limits.grace_s:g} s after {name} (cluster.grace_s): they are ended"
            )
            self._end_all()
        if now > self._deadline and not self._ending:
            self._end_all()

    def _patience(self) -> float | None:
        """Return how many seconds the other hosts have from now on; None: no host has failed or ended yet."""
        outcome = self._outcome
        # Silence has been waited for already, and such a host reports nothing more.
        if any(loss.why.is_silence for loss in outcome.lost.values()):
            return 0.0
        if any(message["killed"] and not message["told"] for message in outcome.ended.values()):
            return min(self.limits.known_s, self.limits.settle_s)
        if outcome.lost or diagnosis.real(outcome.failures):
            return self.limits.settle_s
        statuses = [int(message["status"]) for message in outcome.ended.values()]
        end_requested = (
            self.requests.count > 0
            or self._outcome.reformed != ""
            or any(failure.get("exit_code") == Interrupted.exit_code for failure in outcome.failures)
        )
        if any(statuses) and not end_requested:
            return self.limits.settle_s
        return self.limits.straggling_s if statuses else None

    def _end_all(self) -> None:
        self._ending = True
        self._final = time.monotonic() + self.limits.ending_s
        self._send_all({"do": "end"})


def note_request(message: Message, member: Participant, requests: processes.Requests, display: Display) -> None:
    """Count and show a signal to end the job that another host has received and reported with an "asked" event."""
    # A scheduler signals all hosts at once, so only the first ones are named.
    known = requests.places
    requests.take(
        signal.Signals(int(message["signal"])), place=f"host {member.node}", times=int(message.get("times", 1))
    )
    if requests.places <= MOST_NOTED:
        display.note(f"{member.label} was asked to end the job")
    elif known == MOST_NOTED:
        display.note("so were other hosts")
