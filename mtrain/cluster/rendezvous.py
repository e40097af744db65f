"""The same command on every host, by hand: the first host's process leads, the others find it and serve as agents.

They meet at ``cluster.control_port`` of the first host's address, and nowhere else. Every hello holds the whole spec, the hosts in
order and the version: a host that would train something else is refused at once, here and there, by the first difference. Two
hosts that both take themselves for the first one (another order of ``--ips``) find each other, because one who waits also
looks whether the others are waiting.

Anybody can connect to that port. Only what comes from the address of a host of the job, or knows the secret of the cluster, is
believed to be that host; everything else is refused, told nothing of the job, and neither ends nor delays it (``callers.py``).
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeGuard

import mtrain
from mtrain.cluster.agent import FIRST_WORD_S, Agent, hello
from mtrain.cluster.channel import Channel, Lost, Message
from mtrain.cluster.connections import Addresses, Caller, Waiting, address_of, printable, source_for
from mtrain.cluster.handshake import EVENT as PROOF
from mtrain.cluster.handshake import SAME, Unproven, prove, refuse
from mtrain.cluster.hosts import Member
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.ssh import CLOSING_S, Line, hear, open_line
from mtrain.errors import LaunchError, UsageError
from mtrain.jobs.supervisor import EXIT_CODES, NOTHING
from mtrain.system import placement, processes
from mtrain.system.job_secret import CLUSTER_VARIABLE

CONNECT_S = 2.0
AGAIN_S = 0.3
PATIENT_S = 3.0
"""Waited in silence; then it is told who is missing."""
TELLING_S = 5.0
"""For hosts that are still to come to a job that was refused: they are told why, too."""
ROOM = {True: 64, False: 16}
"""Connections at once whose first word is waited for: from addresses of the job's hosts, and from others. More are closed."""
MOST_NOTES = 20
"""Notes on callers that were refused."""
MOST_REASON = 2000
"""Characters of the reason for which another first host refuses this one."""
OWN_KEYS = ("cluster.node_rank", "report.display")
"""Of the spec, that each host may have otherwise."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """One host's view of the job; equal on all but for ``node``."""

    hosts: Sequence[str]
    node: int
    port: int
    """``cluster.control_port``."""
    mode: str
    values: Mapping[str, Any]
    """The whole spec as plain values."""
    line: Callable[[int], str]
    """What is to be typed on a host."""
    secret: str = ""
    """By which hosts know each other; empty: they take each other's word."""

    def job(self) -> dict[str, Any]:
        """For the hello."""
        return {"node": self.node, "hosts": list(self.hosts), "mode": self.mode, "spec": _flat(self.values)}

    @property
    def first(self) -> str:
        """Where the hosts meet."""
        return self.hosts[0]


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, version: str) -> str | None:
    """The first thing in which two views of a job differ; None: they are of one job."""
    if version != mtrain.__version__:
        return f"it has mtrain {version}, the first host {mtrain.__version__}"
    for key, flag in (("hosts", "--ips"), ("mode", "the command")):
        if mine[key] != theirs.get(key):
            return f"{flag}: it has {_shown(theirs.get(key))}, the first host {_shown(mine[key])}"
    here, there = mine["spec"], theirs.get("spec") or {}
    for key in [*here, *(key for key in there if key not in here)]:
        if key not in OWN_KEYS and here.get(key, _ABSENT) != there.get(key, _ABSENT):
            return f"{key}: it has {_shown(there.get(key))}, the first host {_shown(here.get(key))}"
    return None


def _is_job(job: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a stranger's words are such as ``Party.job`` makes."""
    return (
        isinstance(job, dict)
        and type(job.get("node")) is int
        and isinstance(job.get("spec"), dict)
        and isinstance(job.get("hosts"), list)
        and all(isinstance(host, str) for host in job["hosts"])
    )


_ABSENT = object()


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else repr(value)
    return printable(text, MOST_REASON)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return found


# ---------------------------------------------------------------------------------------------------- on the other hosts
def join(party: Party, *, timeout_s: float, note: Callable[[str], None], again: bool) -> tuple[int, str]:
    """Serve the first host as agent until it says goodbye; returns the exit code of the job, and its last words.

    ``again``: come back when the first host is lost, as a job that may be started again wants.

    Raises:
        LaunchError: the first host does not answer for ``timeout_s``, or is lost.
        UsageError: it refuses this host, or does not know the secret.
    """
    with processes.Requests() as requests, processes.adopting_orphans():
        deadline = time.monotonic() + timeout_s
        while True:
            channel = _reach_first(party, deadline=deadline, timeout_s=timeout_s, note=note, requests=requests)
            if channel is None:
                return EXIT_CODES[requests.first or signal.SIGTERM], NOTHING
            channel.send(hello(job=party.job()))
            try:
                code, text = Agent(channel, requests).serve()
            except Lost as lost:
                if not channel.spoken and time.monotonic() < deadline:
                    time.sleep(AGAIN_S)  # it was just closing the door behind another job
                    continue
                reason = f"the first host, {party.first}, is lost: {lost}; everything of the job was ended here"
                if not again or requests.count:
                    raise LaunchError(reason) from None
                note(f"{reason}; waiting for it to start again")
                deadline = time.monotonic() + timeout_s
                continue
            finally:
                channel.close()
            if code == UsageError.exit_code and text.startswith("error: "):  # refused, or nothing was started
                raise UsageError(text.removeprefix("error: "))
            return code, text


def _reach_first(
    party: Party, *, deadline: float, timeout_s: float, note: Callable[[str], None], requests: processes.Requests
) -> Channel | None:
    told = time.monotonic() + PATIENT_S
    while not requests.count:
        try:
            source = source_for(party.hosts[party.node], party.first)
            connection = socket.create_connection((party.first, party.port), timeout=CONNECT_S, source_address=source)
            if party.secret:
                _prove(connection, party.secret)
            return _channel(connection, peer=party.first)
        except Unproven as error:
            raise UsageError(
                f"what answers at port {party.port} of {party.first} did not prove itself: {error}"
            ) from error
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise LaunchError(
                    f"the first host, {party.first}, has not answered at port {party.port} for {timeout_s:.0f} s "
                    f"({error.strerror or error}); start the job there too: {party.line(0)}"
                ) from error
            if now > told:
                told = float("inf")
                note(f"waiting for the first host, {party.first}; start the job there too: {party.line(0)}")
            time.sleep(AGAIN_S)
    return None


def _prove(connection: socket.socket, secret: str) -> None:
    """See ``prove``; closes the connection where it fails."""
    try:
        prove(connection, secret, joins=True)
    except BaseException:
        connection.close()
        raise


def _channel(connection: socket.socket, *, peer: str) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    descriptor = connection.detach()
    return Channel(descriptor, descriptor, peer=peer, silence_s=FIRST_WORD_S)


# ------------------------------------------------------------------------------------------------------ on the first host
@dataclass(kw_only=True)
class Meeting:
    """The first host waits for the others; its own ranks have an agent as well."""

    party: Party
    python: str
    """Interpreter of the agent of this host."""
    environ: Mapping[str, str]
    note: Callable[[str], None]
    forwards: bool = False
    _own: Line | None = None
    _members: dict[int, Member] = field(default_factory=dict)
    _complete: bool = False
    """Whether all have been here: of those that come later, none ends the job."""
    _strangers: list[Caller] = field(default_factory=list)
    """Connected; have not said hello yet."""
    _examined: Waiting = field(default_factory=Waiting)
    """Connections whose knowledge of the secret is being tested, each by a thread."""
    _met: "SimpleQueue[Caller | str]" = field(default_factory=SimpleQueue)
    """Callers that may say hello, from threads; or a note on one that was refused."""
    _looked_at: "set[str]" = field(default_factory=set)
    """Hosts to which a thread is connecting, because they may take themselves for the first one."""
    _noted: "set[str]" = field(default_factory=set)
    """What was told of refused callers: each thing once."""

    def __post_init__(self) -> None:
        self._addresses = Addresses(self.party.hosts)
        address = next((each for each in placement.resolve(self.party.first) if placement.is_own(each)), None)
        if address is None:
            raise UsageError(
                f"--ips {','.join(self.party.hosts)}: {self.party.first} is no address of this machine, on which the first host "
                "of the job was started; correct --ips, or --node-rank"
            )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((address, self.party.port))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise UsageError(
                f"cluster.control_port: the hosts cannot meet at port {self.party.port} of {address}: "
                f"{error.strerror or error}; give another --control-port on all hosts, or end what listens there"
            ) from error
        self._listener.settimeout(0.0)

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Wait for the hosts of ``nodes``; see ``Gathering``.

        Raises:
            UsageError: one of them is of another job, or a second one of the same place, and not all have been here before.
        """
        try:
            return self._gather(nodes, timeout_s=timeout_s, stop=stop)
        except UsageError as refusal:
            self._tell_why(f"error: {refusal}", stop=stop)
            raise

    def _gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        deadline, told = time.monotonic() + timeout_s, time.monotonic() + PATIENT_S
        findings = self._start_own() if 0 in nodes else []
        look = 0.0
        while (missing := self._missing(nodes)) and time.monotonic() < deadline and not (stop() or self._asked()):
            self._accept()
            while (said := self._next_hello()) is not None:
                self._admit(*said, nodes)
            now = time.monotonic()
            if now > look:
                look = now + CONNECT_S
                for host in {self.party.hosts[node] for node in missing} - self._looked_at:
                    self._looked_at.add(host)
                    threading.Thread(target=self._look_at, args=(host,), daemon=True).start()
            if now > told and missing:
                told = float("inf")
                self._tell(missing)
            time.sleep(0.02)
        missing = self._missing(nodes)
        self._complete = self._complete or not self._missing(range(len(self.party.hosts)))
        findings += [self._never_came(node, timeout_s) for node in missing]
        return {node: self._members[node] for node in nodes if node in self._members and node not in missing}, findings

    def last_words(self, node: int) -> str:
        """Only the own agent is a process that is seen from here."""
        return self._own.last_words() if node == 0 and self._own is not None else ""

    def let_go(self, node: int) -> None:
        """Close the connection."""
        member = self._members.pop(node, None)
        if node == 0 and self._own is not None:
            self._own.end(wait_s=CLOSING_S)
            self._own = None
        elif member is not None:
            member.channel.close()

    def close(self) -> None:
        """Close all connections, and listen no more."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.channel.close(flush_s=0.0)
        for node in list(self._members):
            self.let_go(node)

    def _missing(self, nodes: Sequence[int]) -> list[int]:
        """Those that have not come, or have gone again."""
        there = [node for node, member in self._members.items() if member.channel.lost is None]
        return [node for node in nodes if node not in there and node != 0]

    def _asked(self) -> bool:
        """Whether one that has come was asked to end the job."""
        return any(member.channel.holds("asked") for member in self._members.values())

    def _tell(self, missing: Sequence[int]) -> None:
        hosts = ", ".join(self.party.hosts[node] for node in missing)
        self.note(f"waiting for {hosts}; start the job there too, with the same command: {self.party.line(missing[0])}")

    def _never_came(self, node: int, timeout_s: float) -> Finding:
        return Finding(
            check="meeting",
            state="bad",
            hosts=(self.party.hosts[node],),
            text=f"has not come within {timeout_s:.0f} s",
            remedy=f"start the job there too: {self.party.line(node)}",
        )

    def _start_own(self) -> list[Finding]:
        line = open_line(self.party.first, 0, brought=(), python=self.python, environ=self.environ, local=True)
        said = hear(line, timeout_s=FIRST_WORD_S)
        if isinstance(said, Finding):
            line.end(wait_s=CLOSING_S)
            return [said]
        self._own = line
        self._members[0] = Member(node=0, host=self.party.first, channel=line.channel, hello=said)
        return []

    def _accept(self) -> None:
        """Take what has connected. Connections from other addresses than the hosts' never take the room of a host's."""
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:  # nobody waits, or who did has gone
                break
            address = address_of(peer)
            expected = self._addresses.holds(address)
            waiting = self._examined.count(expected=expected)
            if waiting + sum(stranger.expected == expected for stranger in self._strangers) >= ROOM[expected]:
                connection.close()
            elif self.party.secret:
                self._examined.start(self._examine, connection, address, expected=expected)
            else:
                self._greet(Caller(channel=_channel(connection, peer=address), address=address, expected=expected))
        with suppress(Empty):
            while True:
                met = self._met.get_nowait()
                if isinstance(met, str):
                    self._note_once(met)
                else:
                    self._greet(met)

    def _note_once(self, text: str) -> None:
        """Tell of a refused caller; one who calls again and again is told of once, and many are not told of at all."""
        if text not in self._noted and len(self._noted) < MOST_NOTES:
            self._noted.add(text)
            self.note(text)

    def _examine(self, connection: socket.socket, address: str, *, called: bool = False) -> None:
        """Let who is at the other end prove itself, where there is a secret. ``called``: this end has connected."""
        try:
            if self.party.secret:
                prove(connection, self.party.secret, joins=called)
        except Unproven as error:
            refuse(connection, f"this host was refused: {error}")
            self._met.put(f"{address} asked to take part, and was refused: {error}")
        except OSError:
            connection.close()
        else:
            channel = _channel(connection, peer=address)
            self._met.put(Caller(channel=channel, address=address, expected=True, called=called))

    def _greet(self, caller: Caller) -> None:
        self._strangers.append(caller)
        if caller.called:
            caller.channel.send(hello(job=self.party.job()))

    def _look_at(self, host: str) -> None:
        """Whether somebody waits for hosts over there as well."""
        try:
            connection = socket.create_connection((host, self.party.port), timeout=CONNECT_S)
            self._examine(connection, host, called=True)
        except OSError:
            return
        finally:
            self._looked_at.discard(host)

    def _next_hello(self) -> tuple[Caller, Message] | None:
        """The first message of a caller, which is no stranger from then on; those that are late are let go."""
        for stranger in list(self._strangers):
            late = time.monotonic() > stranger.until
            try:
                message = stranger.channel.wait(0.0)
            except Lost:
                message, late = None, True
            if message is not None or late:
                self._strangers.remove(stranger)
            if message is not None:
                return stranger, message
            if late:
                stranger.channel.close(flush_s=0.0)
        return None

    def _is_host(self, caller: Caller, host: str) -> bool:
        """Whether a caller is believed to be ``host``: one of the job, which proves itself or calls from its own address."""
        if host not in self.party.hosts:
            return False
        return bool(self.party.secret) or self._addresses.of(host, caller.address)

    def _admit(self, caller: Caller, message: Message, nodes: Sequence[int]) -> None:
        """Accept a host, or refuse it.

        A host that belongs to this job but disagrees with it ends the whole job, unless training has started.

        Raises:
            UsageError: there is such a host.
        """
        channel = caller.channel
        if message.get("do") == "bye" and caller.called:  # another first host, which refuses this one
            channel.close(flush_s=0.0)
            raise UsageError(printable(message.get("text", ""), MOST_REASON).removeprefix("error: "))
        if message.get("event") == PROOF:
            self._note_once(f"a host with a {CLUSTER_VARIABLE} asked to take part; this one has none: {SAME}")
        job = message.get("job")
        if message.get("event") != "hello" or not _is_job(job):
            channel.close(flush_s=0.0)
            return
        hosts, node = list(job["hosts"]), job["node"]
        own = str(hosts[node]) if 0 <= node < len(hosts) else "?"
        if not self._is_host(caller, own):
            self._turn_away(caller, printable(own))
            return
        label = f"{own} ({printable(message.get('host'))})"
        problem = self._problem(message, job)
        if problem is not None:
            text = f"host {label} does not fit this job: {problem}; give the same command on every host"
            channel.send(_refusal(f"error: {text}"))
            channel.close()
            of_this_job = node != 0 or sorted(hosts) == sorted(self.party.hosts)
            if of_this_job and not self._complete:
                raise UsageError(text)
            return
        if node not in nodes:
            channel.close(flush_s=0.0)
            return
        channel.peer = own
        self._members[node] = Member(node=node, host=own, channel=channel, hello=message)

    def _problem(self, message: Message, job: Mapping[str, Any]) -> str | None:
        """Why a host of this job cannot take the place that it asks for."""
        found = difference(self.party.job(), job, version=str(message.get("version")))
        if found is not None:
            return found
        node = job["node"]
        if node == 0:
            return "--node-rank: it has 0, which this host has, too"
        if node in self._members and self._members[node].channel.lost is None:
            return f"--node-rank: it has {node}, which {self._members[node].label} has, too"
        return None

    def _turn_away(self, caller: Caller, own: str) -> None:
        """Refuse a caller that is not believed to be the host it says it is; it is told nothing of the job."""
        same = f"give the same --ips on every host, or set the same {CLUSTER_VARIABLE} on all of them"
        caller.channel.send(
            _refusal(
                f"error: the first host does not take {caller.address}, where this call comes from, for host {own} of its job; {same}"
            )
        )
        caller.channel.close()
        self._note_once(
            f"{caller.address} asked to take part as host {own}, and was refused: "
            + (f"it is not the address of that host; {same}" if own in self.party.hosts else "no such host is in --ips")
        )

    def _tell_why(self, text: str, *, stop: Callable[[], bool]) -> None:
        """Say why the job ends here: to all hosts that have come, and to those that come within ``TELLING_S``."""
        for member in self._members.values():
            member.channel.send(_refusal(text))
        left = len(self.party.hosts) - 1 - len({0, *self._members})  # but for the one that was refused
        until = time.monotonic() + TELLING_S
        while left > 0 and time.monotonic() < until and not stop():
            self._accept()
            while (said := self._next_hello()) is not None:
                caller, _ = said
                if self.party.secret or caller.expected:
                    caller.channel.send(_refusal(text))
                    left -= 1
                caller.channel.close()
            time.sleep(0.02)


def _refusal(text: str) -> Message:
    return {"do": "bye", "code": UsageError.exit_code, "text": text}
