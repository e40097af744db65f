"""Rendezvous of hosts on which the same command is started by hand: the first leads, the others serve as agents.

They meet at ``cluster.control_port`` of the first host's address, and nowhere else. Every hello contains the whole
spec, the hosts in order and the version of mtrain. A host that would train something else is refused at once, and both
hosts print the first difference. Two hosts may both take themselves for the first one, if ``--ips`` has another order
on one of them. They find each other because a first host that waits also connects to the others, to see whether they
are waiting as well.

Anybody can connect to that port. A caller is taken for a host of the job only if it calls from that host's address or
knows the secret of the cluster. Every other caller is refused, learns nothing about the job, and neither ends nor
delays it (``connections.py``).
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import mtrain
from mtrain.cluster.agent import FIRST_MESSAGE_S, Agent, hello
from mtrain.cluster.agent_processes import CLOSING_S, Line, hear, open_own_line
from mtrain.cluster.channel import Channel, Lost, Message
from mtrain.cluster.connections import HELLO_S, Addresses, Caller, address_of, printable, source_for
from mtrain.cluster.farewell import Farewell
from mtrain.cluster.handshake import HANDSHAKE_EVENT, REMEDY, Unproven, prove, refuse
from mtrain.cluster.hosts import Member
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.supervisor import EXIT_CODES, NOTHING
from mtrain.errors import LaunchError, UsageError
from mtrain.system import names, placement, processes
from mtrain.system.job_secret import CLUSTER_VARIABLE

CONNECT_S = 2.0
"""Seconds that an attempt to connect may take."""
AGAIN_S = 0.3
"""Seconds between two attempts to connect to the first host."""
ARRIVAL_S = 0.05
"""Seconds for which a job that runs listens for hosts, each time that it does."""
SILENT_WAIT_S = 3.0
"""Seconds of waiting before the user is told which hosts are missing."""
TELLING_S = 5.0
"""Seconds during which a refused job still listens, so that hosts that come late are told the reason, too."""
MAX_UNIDENTIFIED = {True: 64, False: 16}
"""Connections that may be open before their hello: from addresses of the job's hosts (True), from others (False). More
are closed."""
MAX_NOTES = 20
"""Most notes that are shown about refused callers."""
MAX_REASON = 2000
"""Most characters shown of the reason for which another first host refuses this one."""
OWN_KEYS = ("cluster.node_rank", "report.display")
"""Keys of the spec whose values may differ between hosts."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """One host's view of the job; only ``node`` differs between hosts."""

    hosts: Sequence[str]
    """Addresses, the first host's first."""
    node: int
    """Index of this host in ``hosts``."""
    port: int
    """``cluster.control_port``."""
    mode: str
    """The command: "train", "evaluate" ..."""
    values: Mapping[str, Any]
    """The whole spec as plain values."""
    line: Callable[[int], str]
    """Returns the command to type on a host, for its index."""
    secret: str = ""
    """The secret that hosts prove to each other; empty: a caller's address is enough."""

    def job(self) -> dict[str, Any]:
        """Return the description of the job that goes into the hello, where the first host compares it with its own."""
        return {"node": self.node, "hosts": list(self.hosts), "mode": self.mode, "spec": _flat(self.values)}

    @property
    def first(self) -> str:
        """Return the address of the first host, where the hosts meet."""
        return self.hosts[0]


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, version: str) -> str | None:
    """Return the first difference between two descriptions of a job, in words; None: there is none.

    ``mine`` is that of the first host, ``theirs`` and ``version`` are those of the host that calls.
    """
    if version != mtrain.__version__:
        return f"it has mtrain {version}, the first host {mtrain.__version__}"
    for key, flag in (("hosts", "--ips"), ("mode", "the command")):
        if mine[key] != theirs.get(key):
            return f"{flag}: it has {_displayed(theirs.get(key))}, the first host {_displayed(mine[key])}"
    here, there = mine["spec"], theirs.get("spec") or {}
    for key in [*here, *(key for key in there if key not in here)]:
        if key not in OWN_KEYS and here.get(key, _ABSENT) != there.get(key, _ABSENT):
            return f"{key}: it has {_displayed(there.get(key))}, the first host {_displayed(here.get(key))}"
    return None


def _is_job(job: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an untrusted value has the form that ``Party.job`` returns."""
    return (
        isinstance(job, dict)
        and type(job.get("node")) is int
        and isinstance(job.get("spec"), dict)
        and isinstance(job.get("hosts"), list)
        and all(isinstance(host, str) for host in job["hosts"])
    )


def _own_host(job: Mapping[str, Any]) -> str:
    """Return the host of its list that the sender of a hello claims to be."""
    hosts, node = job["hosts"], job["node"]
    return str(hosts[node]) if 0 <= node < len(hosts) else "?"


_ABSENT = object()


def _displayed(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else repr(value)
    return printable(text, MAX_REASON)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``values`` as one mapping: dotted path -> value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat


# --------------------------------------------------------------------------------------------------- on the other hosts
def join(party: Party, *, timeout_s: float, note: Callable[[str], None], again: bool) -> Farewell:
    """Serve the first host as agent until it sends its farewell, and return that.

    ``again``: reconnect when the first host is lost, because the job may be restarted there.

    Raises:
        LaunchError: the first host does not answer for ``timeout_s``, or is lost.
        UsageError: the first host refuses this one, did not start the job, or does not know the secret.
    """
    with processes.Requests() as requests, processes.adopting_orphans():
        deadline = time.monotonic() + timeout_s
        while True:
            channel = _reach_first(party, deadline=deadline, timeout_s=timeout_s, note=note, requests=requests)
            if channel is None:
                return Farewell(code=EXIT_CODES[requests.first or signal.SIGTERM], text=NOTHING, reason=NOTHING)
            channel.send(hello(job=party.job()))
            try:
                farewell = Agent(channel, requests).serve()
            except Lost as lost:
                # A connection that closes before any message was accepted by an earlier job that has just ended there.
                if not channel.spoken and time.monotonic() < deadline:
                    time.sleep(AGAIN_S)
                    continue
                reason = f"the first host, {party.first}, is lost: {lost}; everything of the job was ended here"
                if not again or requests.count:
                    raise LaunchError(reason) from None
                note(f"{reason}; waiting for it to start again")
                deadline = time.monotonic() + timeout_s
                continue
            finally:
                channel.close()
            if farewell.refusal is not None:
                raise UsageError(farewell.refusal)
            return farewell


def _reach_first(
    party: Party, *, deadline: float, timeout_s: float, note: Callable[[str], None], requests: processes.Requests
) -> Channel | None:
    """Connect to the first host, trying again until ``deadline``.

    Return None where a signal asks this process to end.
    """
    note_at = time.monotonic() + SILENT_WAIT_S
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
            now, unknown = time.monotonic(), isinstance(error, socket.gaierror)
            if now > deadline and unknown:
                raise LaunchError(
                    f"{names.never([party.first], timeout_s)}, so the first host cannot be reached; correct --ips, or "
                    "enter the name into /etc/hosts"
                ) from error
            if now > deadline:
                raise LaunchError(
                    f"the first host, {party.first}, has not answered at port {party.port} for {timeout_s:.0f} s "
                    f"({error.strerror or error}); start the job there too: {party.line(0)}"
                ) from error
            if now > note_at:
                note_at = float("inf")
                why = f", until {names.in_words([party.first])} known here" if unknown else ""
                note(f"waiting for the first host, {party.first}{why}; start the job there too: {party.line(0)}")
            time.sleep(AGAIN_S)
    return None


def _prove(connection: socket.socket, secret: str) -> None:
    """Run the handshake as the host that joins, see ``prove``; close the connection where it fails."""
    try:
        asyncio.run(prove(connection, secret, joins=True))
    except BaseException:
        connection.close()
        raise


def _channel(connection: socket.socket, *, peer: str) -> Channel:
    """Return a channel that takes over the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    descriptor = connection.detach()
    return Channel(descriptor, descriptor, peer=peer, silence_s=FIRST_MESSAGE_S)


# ---------------------------------------------------------------------------------------------------- on the first host
@dataclass(kw_only=True)
class Meeting:
    """The rendezvous on the first host, which waits for the others.

    The first host has an agent as well, in a child process.
    """

    party: Party
    python: str
    """Interpreter of this host's own agent."""
    environ: Mapping[str, str]
    """Environment of this host's own agent."""
    note: Callable[[str], None]
    """Shows the user a line."""
    timeout_s: float = 0.0
    """Seconds that this host's own name may take to become known."""
    forwards: bool = False
    _own: Line | None = None
    """The connection to this host's own agent."""
    _members: dict[int, Member] = field(default_factory=dict)
    _complete: bool = False
    """Whether all hosts have been here. From then on, no host that comes can end the job."""
    _callers: "dict[asyncio.Task[None], bool]" = field(default_factory=dict)
    """The task of each connection that has not sent its hello yet, and whether it may be a host of the job."""
    _refusal: Exception | None = None
    """Why the job ends, once a host of the job does not fit."""
    _turned_away: int = 0
    """Hosts that came after that and were told why."""
    _wanted: Sequence[int] = ()
    """The hosts for which ``gather`` waits."""
    _probed: "set[str]" = field(default_factory=set)
    """Hosts to which a thread is connecting, because they may take themselves for the first one."""
    _past_notes: "set[str]" = field(default_factory=set)
    """Notes about refused callers that were shown: each is shown once."""

    def __post_init__(self) -> None:
        self._addresses = Addresses(self.party.hosts)
        first = self.party.first
        known = names.resolved(
            [first],
            limit_s=self.timeout_s,
            late=lambda missing: self.note(
                f"waiting until {names.in_words(missing)} known here, where hosts will meet"
            ),
        )[first] or placement.resolve(first)
        if not known:
            raise UsageError(
                f"{names.never([first], self.timeout_s)} on the first host itself; correct --ips, or enter the name "
                "into /etc/hosts"
            )
        address = next((each for each in known if placement.is_own(each)), None)
        if address is None:
            raise UsageError(
                f"--ips {','.join(self.party.hosts)}: {self.party.first} is no address of this machine, on which the "
                "first host "
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
        self._loop = asyncio.new_event_loop()

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Wait for the hosts of ``nodes``; see ``Gathering``.

        Raises:
            UsageError: a host disagrees with this job, or has the index of another, and not all hosts have been here
                before.
        """
        self._wanted = nodes
        findings = self._start_own() if 0 in nodes else []
        missing = self._loop.run_until_complete(self._await_hosts(nodes, timeout_s=timeout_s, stop=stop))
        self._complete = self._complete or not self._missing(range(len(self.party.hosts)))
        findings += [self._never_came(node, timeout_s) for node in missing]
        return {node: self._members[node] for node in nodes if node in self._members and node not in missing}, findings

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Accept those of ``nodes`` that have connected; see ``Gathering``. A host that does not fit is refused."""
        self._wanted, self._complete = nodes, True  # the job runs: nobody who comes now can end it
        missing = self._loop.run_until_complete(self._await_hosts(nodes, timeout_s=ARRIVAL_S, stop=lambda: False))
        return {node: self._members[node] for node in nodes if node in self._members and node not in missing}

    async def _await_hosts(self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]) -> list[int]:
        """Accept connections until all ``nodes`` are connected; return those that are still missing.

        Raises:
            UsageError: see ``gather``.
        """
        deadline, note_at = time.monotonic() + timeout_s, time.monotonic() + SILENT_WAIT_S
        next_probe = 0.0
        listening = asyncio.create_task(self._listen())
        try:
            while (
                (missing := self._missing(nodes))
                and time.monotonic() < deadline
                and not (self._refusal or stop() or self._end_requested())
            ):
                now = time.monotonic()
                if now > next_probe:
                    next_probe = now + CONNECT_S
                    for host in {self.party.hosts[node] for node in missing} - self._probed:
                        self._probed.add(host)
                        threading.Thread(target=self._probe, args=(host,), daemon=True).start()
                if now > note_at:
                    note_at = float("inf")
                    self._note_missing(missing)
                await asyncio.sleep(0.02)
            if self._refusal is not None:
                await self._send_refusals(str(self._refusal), stop=stop)
                raise self._refusal
            return missing
        finally:
            listening.cancel()
            await asyncio.wait([listening])

    def last_words(self, node: int) -> str:
        """Return how this host's own agent ended; the agents of other hosts are no children of this process."""
        return self._own.last_words() if node == 0 and self._own is not None else ""

    def let_go(self, node: int) -> None:
        """Close the connection to a host; this host's own agent is ended."""
        member = self._members.pop(node, None)
        if node == 0 and self._own is not None:
            self._own.end(wait_s=CLOSING_S)
            self._own = None
        elif member is not None:
            member.channel.close()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for task in self._callers:
            task.cancel()
        if self._callers:
            self._loop.run_until_complete(asyncio.wait(self._callers))
        self._loop.close()
        self._listener.close()
        for node in list(self._members):
            self.let_go(node)

    def _missing(self, nodes: Sequence[int]) -> list[int]:
        """Return which of ``nodes`` have not connected, or have been lost since."""
        connected = [node for node, member in self._members.items() if member.channel.lost is None]
        return [node for node in nodes if node not in connected and node != 0]

    def _end_requested(self) -> bool:
        """Return whether a connected host was asked to end the job, for example with Ctrl-C."""
        return any(member.channel.holds("asked") for member in self._members.values())

    def _unknown(self, nodes: Sequence[int]) -> list[str]:
        """Return the names of ``nodes`` that have no address here; a host with the secret needs none."""
        return [] if self.party.secret else [host for host in self._hosts(nodes) if not self._addresses.known(host)]

    def _hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self.party.hosts[node] for node in nodes]

    def _note_missing(self, missing: Sequence[int]) -> None:
        unknown = self._unknown(missing)
        why = f", until {names.in_words(unknown)} known here" if unknown else ""
        hosts = ", ".join(self._hosts(missing))
        self.note(
            f"waiting for {hosts}{why}; start the job there too, with the same command: {self.party.line(missing[0])}"
        )

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

    async def _listen(self) -> None:
        """Accept connections.

        Those from the hosts' addresses and from others are counted separately, so strangers cannot keep a host out.
        """
        while True:
            try:
                connection, peer = await self._loop.sock_accept(self._listener)
            except OSError:  # The caller has closed the connection already, or too many files are open.
                await asyncio.sleep(0.02)
                continue
            address = address_of(peer)
            expected = self._addresses.holds(address)
            if sum(each == expected for each in self._callers.values()) >= MAX_UNIDENTIFIED[expected]:
                connection.close()
            else:
                self._hear(connection, address, expected=expected)

    def _hear(self, connection: socket.socket, address: str, *, expected: bool, called: bool = False) -> None:
        """Start the task that identifies a caller.

        ``expected``: whether it may be a host of the job, because its address is that of one. ``called``: whether this
        end has opened the connection, to find out whether the host there leads the same job, too.
        """
        task = self._loop.create_task(self._identify(connection, address, expected=expected, called=called))
        self._callers[task] = expected
        task.add_done_callback(self._heard)

    def _heard(self, task: "asyncio.Task[None]") -> None:
        del self._callers[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._refusal = self._refusal or error

    def _note_once(self, text: str) -> None:
        """Show a note about a refused caller: each text once, and ``MAX_NOTES`` in all."""
        if text not in self._past_notes and len(self._past_notes) < MAX_NOTES:
            self._past_notes.add(text)
            self.note(text)

    async def _identify(self, connection: socket.socket, address: str, *, expected: bool, called: bool) -> None:
        """Run the handshake where there is a secret, wait for the hello, and accept the host or refuse it."""
        try:
            if self.party.secret:
                await prove(connection, self.party.secret, joins=called)
        except Unproven as error:
            self._note_once(f"{address} asked to take part, and was refused: {error}")
            await refuse(connection, f"this host was refused: {error}")
            return
        except (OSError, asyncio.CancelledError):
            connection.close()
            return
        channel, message = _channel(connection, peer=address), None
        if called:  # The host there waits for a hello, like any first host.
            channel.send(hello(job=self.party.job()))
        until = time.monotonic() + HELLO_S
        with suppress(Lost, asyncio.CancelledError):
            while (message := channel.wait(0.0)) is None and time.monotonic() < until:
                await asyncio.sleep(0.02)
        if message is None:
            channel.close(flush_s=0.0)
        elif not await self._is_name_known(channel, message):
            channel.close()
        else:
            self._answer(Caller(channel=channel, address=address, expected=expected, called=called), message)

    async def _is_name_known(self, channel: Channel, message: Message) -> bool:
        """Wait until the name of the host that a caller claims to be is known here, so that it is not refused before.

        Return False where the caller has gone meanwhile. The wait ends with the meeting.
        """
        job = message.get("job")
        own = _own_host(job) if _is_job(job) else ""
        try:
            while own in self.party.hosts and not self.party.secret and self._refusal is None:
                if self._addresses.known(own):
                    break
                if channel.lost is not None:
                    return False
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            channel.send(Farewell.refused(f"the first host does not know the name {printable(own)}").message())
            return False
        return True

    def _answer(self, caller: Caller, message: Message) -> None:
        """Accept a caller or refuse it; once the job ends, tell it why if it may be a host of the job.

        Raises:
            UsageError: see ``_admit``.
        """
        if self._refusal is None:
            self._admit(caller, message)
            return
        if self.party.secret or caller.expected:
            caller.channel.send(Farewell.refused(str(self._refusal)).message())
            self._turned_away += 1
        caller.channel.close()

    def _probe(self, host: str) -> None:
        """Connect to a host, to find out whether it takes itself for the first host as well and waits for others."""
        try:
            connection = socket.create_connection((host, self.party.port), timeout=CONNECT_S)
            connection.settimeout(0.0)
            self._loop.call_soon_threadsafe(partial(self._hear, connection, host, expected=True, called=True))
        except (OSError, RuntimeError):  # RuntimeError: the meeting has been closed meanwhile.
            return
        finally:
            self._probed.discard(host)

    def _is_host(self, caller: Caller, host: str) -> bool:
        """Return whether a caller is taken for ``host``: it knows the secret, or calls from that host's address."""
        if host not in self.party.hosts:
            return False
        return bool(self.party.secret) or self._addresses.of(host, caller.address)

    def _admit(self, caller: Caller, message: Message) -> None:
        """Accept a host, or refuse it.

        A host that belongs to this job but disagrees with it ends the whole job, unless training has started.

        Raises:
            UsageError: there is such a host.
        """
        channel = caller.channel
        if message.get("do") == "bye" and caller.called:  # another first host, which refuses this one
            channel.close(flush_s=0.0)
            raise UsageError(printable(message.get("refusal", message.get("text", "")), MAX_REASON))
        if message.get("event") == HANDSHAKE_EVENT:
            self._note_once(f"a host with a {CLUSTER_VARIABLE} asked to take part; this one has none: {REMEDY}")
        job = message.get("job")
        if message.get("event") != "hello" or not _is_job(job):
            channel.close(flush_s=0.0)
            return
        hosts, node, own = list(job["hosts"]), job["node"], _own_host(job)
        if not self._is_host(caller, own):
            self._reject_impostor(caller, printable(own))
            return
        label = f"{own} ({printable(message.get('host'))})"
        problem = self._problem(message, job)
        if problem is not None:
            text = f"host {label} does not fit this job: {problem}; give the same command on every host"
            channel.send(Farewell.refused(text).message())
            channel.close()
            of_this_job = node != 0 or sorted(hosts) == sorted(self.party.hosts)
            if of_this_job and not self._complete:
                raise UsageError(text)
            return
        if node not in self._wanted:
            channel.close(flush_s=0.0)
            return
        channel.peer = own
        self._members[node] = Member(node=node, host=own, channel=channel, hello=message)

    def _problem(self, message: Message, job: Mapping[str, Any]) -> str | None:
        """Return why a host of this job cannot have the index that it asks for, or None."""
        mismatch = difference(self.party.job(), job, version=str(message.get("version")))
        if mismatch is not None:
            return mismatch
        node = job["node"]
        if node == 0:
            return "--node-rank: it has 0, which this host has, too"
        if node in self._members and self._members[node].channel.lost is None:
            return f"--node-rank: it has {node}, which {self._members[node].label} has, too"
        return None

    def _reject_impostor(self, caller: Caller, own: str) -> None:
        """Refuse a caller that is not taken for host ``own``, which it says it is; it learns nothing about the job."""
        remedy = f"give the same --ips on every host, or set the same {CLUSTER_VARIABLE} on all of them"
        reason = (
            f"the first host does not take {caller.address}, where this call comes from, for host {own} of its job; "
            f"{remedy}"
        )
        caller.channel.send(Farewell.refused(reason).message())
        caller.channel.close()
        self._note_once(
            f"{caller.address} asked to take part as host {own}, and was refused: "
            + (
                f"it is not the address of that host; {remedy}"
                if own in self.party.hosts
                else "no such host is in --ips"
            )
        )

    async def _send_refusals(self, reason: str, *, stop: Callable[[], bool]) -> None:
        """Send why the job ends to all hosts that have connected, and to those that connect within ``TELLING_S``."""
        for member in self._members.values():
            member.channel.send(Farewell.refused(reason).message())
        # One less: the host that was refused has its answer.
        absent = len(self.party.hosts) - 1 - len({0, *self._members})
        until = time.monotonic() + TELLING_S
        while self._turned_away < absent and time.monotonic() < until and not stop():
            await asyncio.sleep(0.02)
