"""Rendezvous of hosts on which the same command is started by hand: the first leads, the others serve as agents.

They meet at ``cluster.control_port`` of the first host's address, and nowhere else (``listener.py``); the others call there
(``joining.py``), and the first host decides who takes part (``admission.py``). Two hosts may both take themselves for the
first one, if ``--ips`` has another order on one of them. They find each other because a first host that waits also calls the
others, to see whether they are waiting as well.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mtrain.errors import UsageError
from mtrain.jobs.hosts.admission import Knowledge, Party, admit, claimed_host, is_job
from mtrain.jobs.hosts.agent import FIRST_MESSAGE_S, hello
from mtrain.jobs.hosts.agent_processes import CLOSING_S, Line, hear, open_own_line
from mtrain.jobs.hosts.connections import CONNECT_S, SILENT_WAIT_S, Addresses, Caller, printable
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.listener import POLL_S, Listener, listening_socket
from mtrain.jobs.hosts.messages import Farewell, Message
from mtrain.jobs.preflight.findings import Finding
from mtrain.spec.hostnames import few
from mtrain.system import names

ARRIVAL_S = 0.05
"""Seconds for which a job that runs listens for hosts, each time that it does."""
CLOSE_S = 1.0
"""Seconds that the last messages to a host may take."""
TELLING_S = 5.0
"""Seconds during which a refused job still listens, so that hosts that come late are told the reason, too."""
MAX_NOTES = 20
"""Most notes that are shown about refused callers."""


def open_meeting(
    party: Party, *, python: str, environ: Mapping[str, str], note: Callable[[str], None], timeout_s: float = 0.0
) -> "Meeting":
    """Listen where hosts meet, once this host's own name is known, which may take ``timeout_s``.

    Raises:
        UsageError: the hosts cannot meet here.
    """
    listening = listening_socket(party, note=note, timeout_s=timeout_s)
    return Meeting(listening, party=party, python=python, environ=environ, note=note)


@dataclass(kw_only=True)
class Meeting:
    """The rendezvous on the first host, which waits for the others.

    The first host has an agent as well, in a child process.
    """

    listening: socket.socket = field(kw_only=False)
    """The socket to which hosts connect."""
    party: Party
    python: str
    """Interpreter of this host's own agent."""
    environ: Mapping[str, str]
    """Environment of this host's own agent."""
    note: Callable[[str], None]
    """Shows the user a line."""
    forwards: bool = False
    _own: Line | None = None
    """The connection to this host's own agent."""
    _members: dict[int, Member] = field(default_factory=dict)
    _complete: bool = False
    """Whether all hosts have been here. From then on, no host that comes can end the job."""
    _refusal: str = ""
    """Why the job ends, once a host of the job does not fit."""
    _turned_away: int = 0
    """Hosts that came after that and were told why."""
    _wanted: Sequence[int] = ()
    """The hosts for which ``gather`` waits."""
    _parting: "set[int]" = field(default_factory=set)
    """Hosts that were asked to end, and whose ranks may still save."""
    _past_notes: "set[str]" = field(default_factory=set)
    """Notes about refused callers that were shown: each is shown once."""

    def __post_init__(self) -> None:
        self._addresses = Addresses(self.party.hosts)
        self._listener = Listener(
            self.listening,
            self.party,
            addresses=self._addresses,
            answer=self._answer,
            greeting=hello(job=self.party.job()),
            note=self._note_once,
        )

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Wait for the hosts of ``nodes``; see ``Gathering``.

        Raises:
            UsageError: a host disagrees with this job, or has the index of another, and not all hosts have been here
                before.
        """
        # The first host has an agent like every other one, so that the leader treats its ranks in the same way.
        findings = self._start_own() if 0 in nodes else []
        members = self._gather(nodes, timeout_s=timeout_s, stop=stop)
        self._complete = self._complete or not self._missing(range(len(self.party.hosts)))
        return members, findings + [self._never_came(node, timeout_s) for node in nodes if node and node not in members]

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Accept those of ``nodes`` that have connected; see ``Gathering``. A host that does not fit is refused."""
        self._complete = True  # the job runs: nobody who comes now can end it
        return self._gather(nodes, timeout_s=ARRIVAL_S, stop=lambda: False)

    def _gather(self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]) -> dict[int, Member]:
        self._wanted = nodes
        missing = self._listener.run(lambda: self._await_hosts(nodes, timeout_s=timeout_s, stop=stop))
        return {node: self._members[node] for node in nodes if node in self._members and node not in missing}

    async def _await_hosts(self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]) -> list[int]:
        """Wait until all ``nodes`` are connected; return those that are still missing.

        Raises:
            UsageError: see ``gather``.
        """
        deadline, note_at = time.monotonic() + timeout_s, time.monotonic() + SILENT_WAIT_S
        next_call = 0.0
        while (
            (missing := self._missing(nodes))
            and time.monotonic() < deadline
            and not (self._refusal or stop() or self._end_requested())
        ):
            now = time.monotonic()
            if now > next_call:
                next_call = now + CONNECT_S
                # Two hosts may both take themselves for the first one, and then neither would ever be called.
                for host in self._hosts(missing):
                    self._listener.call(host)
            if now > note_at:
                note_at = float("inf")
                self._note_missing(missing)
            await asyncio.sleep(POLL_S)
        if self._refusal:
            await self._send_refusals(stop=stop)
            raise UsageError(self._refusal)
        return missing

    def leave_alone(self, node: int, *, seconds: float) -> None:
        """Let a host end that was asked to: it is not fetched, and the same command typed again there is heard after."""
        self._parting.add(node)

    def last_words(self, node: int) -> str:
        """Return how this host's own agent ended; the agents of other hosts are no children of this process."""
        return self._own.last_words() if node == 0 and self._own is not None else ""

    def let_go(self, nodes: Sequence[int]) -> None:
        """Close the connections to hosts; this host's own agent is ended."""
        gone = {node: member for node in nodes if (member := self._members.pop(node, None)) is not None}
        self._parting.difference_update(nodes)
        for member in gone.values():
            member.channel.begin_closing(flush_s=CLOSE_S)
        if 0 in nodes and self._own is not None:
            self._own.end(wait_s=CLOSING_S)
            self._own = None
        for node, member in gone.items():
            if node:
                member.channel.close(flush_s=CLOSE_S)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        self._listener.close()
        self.let_go(list(self._members))

    def _missing(self, nodes: Sequence[int]) -> list[int]:
        """Return which of ``nodes`` have not connected, or have been lost since."""
        return [node for node in nodes if node != 0 and not self._is_connected(node)]

    def _is_connected(self, node: int) -> bool:
        member = self._members.get(node)
        return member is not None and member.channel.lost is None

    def _end_requested(self) -> bool:
        """Return whether a connected host was asked to end the job, for example with Ctrl-C."""
        return any(member.channel.holds("asked") for member in self._members.values())

    def _unknown(self, nodes: Sequence[int]) -> list[str]:
        """Return the names of ``nodes`` that have no address here; a host with the secret needs none."""
        return (
            [] if self.party.secret else [host for host in self._hosts(nodes) if not self._addresses.addresses_of(host)]
        )

    def _hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self.party.hosts[node] for node in nodes]

    def _note_missing(self, missing: Sequence[int]) -> None:
        unknown = self._unknown(missing)
        why = f", until {names.in_words(unknown)} known here" if unknown else ""
        hosts = few(self._hosts(missing))
        self.note(
            f"waiting for {hosts}{why}; start the job there too, with the same command: {self.party.line(missing[0])}"
        )

    def _note_once(self, text: str) -> None:
        """Show a note about a refused caller: each text once, and ``MAX_NOTES`` in all."""
        if text not in self._past_notes and len(self._past_notes) < MAX_NOTES:
            self._past_notes.add(text)
            self.note(text)

    def _never_came(self, node: int, timeout_s: float) -> Finding:
        unknown = self._unknown([node])
        remedy = "correct --ips, or enter the name into /etc/hosts of the first host; " if unknown else ""
        return Finding(
            check="meeting",
            state="bad",
            hosts=(self.party.hosts[node],),
            text=names.never(unknown, timeout_s) if unknown else f"has not come within {timeout_s:.0f} s",
            remedy=f"{remedy}start the job there too: {self.party.line(node)}",
        )

    def _start_own(self) -> list[Finding]:
        """Start the agent of this host; return a finding where it does not come up."""
        line = open_own_line(self.party.first, 0, python=self.python, environ=self.environ)
        greeting = hear(line, timeout_s=FIRST_MESSAGE_S)
        if isinstance(greeting, Finding):
            line.end(wait_s=CLOSING_S)
            return [greeting]
        self._own = line
        self._members[0] = Member(node=0, host=self.party.first, channel=line.channel, hello=greeting)
        return []

    async def _answer(self, caller: Caller, message: Message) -> None:
        """Accept a caller or refuse it; once the job ends, tell it why if it may be a host of the job."""
        channel = caller.channel
        # A name of a pod becomes known some time after the pod runs, and until then its call looks like a stranger's.
        if not await self._is_name_known(caller, message):
            channel.close()
            return
        if self._refusal:
            if self.party.secret or caller.expected:
                channel.send(Farewell.for_refusal(self._refusal).message())
                self._turned_away += 1
            channel.close()
            return
        known = Knowledge(
            party=self.party,
            wanted=self._wanted,
            taken=lambda node: self._members[node].label if self._is_connected(node) else None,
            parting=self._parting,
            complete=self._complete,
            has_address=self._addresses.of,
        )
        decision = admit(known, message, address=caller.address, called=caller.called)
        if decision.note:
            self._note_once(decision.note)
        if decision.accepted is not None:
            host = self.party.hosts[decision.accepted]
            channel.peer = host
            self._members[decision.accepted] = Member(node=decision.accepted, host=host, channel=channel, hello=message)
            return
        if decision.refusal:
            channel.send(Farewell.for_refusal(decision.refusal).message())
            channel.close()
        else:
            channel.close(flush_s=0.0)
        self._refusal = decision.ends_job

    async def _is_name_known(self, caller: Caller, message: Message) -> bool:
        """Wait until the name of the host that a caller claims to be is known here, so that it is not refused before.

        Return False where the caller has gone meanwhile. The wait ends with the meeting.
        """
        job = message.get("job")
        own = claimed_host(job) if is_job(job) else ""
        try:
            while own in self.party.hosts and not self.party.secret and not self._refusal:
                if self._addresses.addresses_of(own):
                    break
                if caller.channel.lost is not None:
                    return False
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            text = f"the first host does not know the name {printable(own)}"
            caller.channel.send(Farewell.for_refusal(text).message())
            return False
        return True

    async def _send_refusals(self, *, stop: Callable[[], bool]) -> None:
        """Send why the job ends to all hosts that have connected, and to those that connect within ``TELLING_S``."""
        for member in self._members.values():
            member.channel.send(Farewell.for_refusal(self._refusal).message())
        # One less: the host that was refused has its answer.
        absent = len(self.party.hosts) - 1 - len({0, *self._members})
        until = time.monotonic() + TELLING_S
        while self._turned_away < absent and time.monotonic() < until and not stop():
            await asyncio.sleep(POLL_S)
