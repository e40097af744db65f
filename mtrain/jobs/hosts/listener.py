"""The port of the first host where the hosts of a job meet: who connects is heard, in bounded number and time.

Anybody can connect to that port. A connection passes through the handshake, where the cluster has a secret, and its first
message; what is said in it is judged elsewhere (``admission.py``).
"""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from mtrain.errors import UsageError
from mtrain.jobs.hosts.admission import Party
from mtrain.jobs.hosts.channel import Lost
from mtrain.jobs.hosts.connections import (
    CONNECT_S,
    HELLO_S,
    Addresses,
    Caller,
    address_of,
    channel_over,
    source_for,
)
from mtrain.jobs.hosts.handshake import Unproven, prove, refuse
from mtrain.jobs.hosts.messages import Message
from mtrain.system import names, placement

MAX_UNIDENTIFIED = {True: 64, False: 16}
"""Connections that may be open before their hello: from addresses of the job's hosts (True), from others (False). More
are closed."""
MAX_CALLS = 64
"""Most hosts that this end calls at once."""
POLL_S = 0.02
Result = TypeVar("Result")


def listening_socket(party: Party, *, note: Callable[[str], None], timeout_s: float) -> socket.socket:
    """Return a socket that listens where the hosts of a job meet, once the first host's own name is known.

    Raises:
        UsageError: the name does not become known within ``timeout_s``, is none of this machine, or its port is in use.
    """
    first = party.first
    known = names.resolve(
        [first],
        limit_s=timeout_s,
        late=lambda missing: note(f"waiting until {names.in_words(missing)} known here, where hosts will meet"),
    )[first] or placement.resolve(first)
    if not known:
        raise UsageError(
            f"{names.never([first], timeout_s)} on the first host itself; correct --ips, or enter the name into /etc/hosts"
        )
    address = next((each for each in known if placement.is_own(each)), None)
    if address is None:
        raise UsageError(
            f"--ips {','.join(party.hosts)}: {first} is no address of this machine, on which the first host of the job was "
            "started; correct --ips, or --node-rank"
        )
    try:
        listening = placement.listen_at(address, party.port, backlog=64)
    except OSError as error:
        raise UsageError(
            f"cluster.control_port: the hosts cannot meet at port {party.port} of {address}: {error.strerror or error}; give "
            "another --control-port on all hosts, or end what listens there"
        ) from error
    listening.settimeout(0.0)
    return listening


class Listener:
    """Hears those who connect to a listening socket, and those whom this end calls; both while ``run`` runs.

    Args:
        listening: the socket.
        party: this host's view of the job.
        addresses: those of the hosts.
        answer: receives each caller with its first message.
        greeting: what this end says first where it calls.
        note: shows the user a line.
    """

    def __init__(
        self,
        listening: socket.socket,
        party: Party,
        *,
        addresses: Addresses,
        answer: Callable[[Caller, Message], Awaitable[None]],
        greeting: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self._listening = listening
        self._party = party
        self._addresses = addresses
        self._answer = answer
        self._greeting = greeting
        self._note = note
        self._loop = asyncio.new_event_loop()
        self._callers: dict[asyncio.Task[None], bool] = {}
        """The task of each connection that has not sent its hello yet, and whether it may be a host of the job."""
        self._calls: dict[str, asyncio.Task[None]] = {}
        """The task of each host that this end is calling."""
        self._calling = asyncio.Semaphore(MAX_CALLS)

    def run(self, waiting: Callable[[], Awaitable[Result]]) -> Result:
        """Hear callers until ``waiting`` returns; return its result."""

        async def hear_meanwhile() -> Result:
            listening = asyncio.create_task(self._listen())
            try:
                return await waiting()
            finally:
                listening.cancel()
                await asyncio.wait([listening])

        return self._loop.run_until_complete(hear_meanwhile())

    def call(self, host: str) -> None:
        """Connect to a host, to find out whether it takes itself for the first host as well and waits for others."""
        if host not in self._calls:
            self._calls[host] = self._loop.create_task(self._reach(host))
            self._calls[host].add_done_callback(lambda _: self._calls.pop(host))

    def close(self) -> None:
        """Close the listening socket, and the connections of those who have not been heard."""
        tasks = [*self._calls.values(), *self._callers]
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()
        self._listening.close()

    async def _listen(self) -> None:
        """Accept connections."""
        while True:
            try:
                connection, peer = await self._loop.sock_accept(self._listening)
            except OSError:  # The caller has closed the connection already, or too many files are open.
                await asyncio.sleep(POLL_S)
                continue
            address = address_of(peer)
            # Those from the hosts' addresses and from others are counted separately, so strangers cannot keep a host out.
            expected = self._addresses.holds(address)
            if sum(each == expected for each in self._callers.values()) >= MAX_UNIDENTIFIED[expected]:
                connection.close()
            else:
                self._hear(connection, address, expected=expected, called=False)

    async def _reach(self, host: str) -> None:
        """Connect to a host. It must see this host's address in the list of hosts, or it takes this host for a stranger."""
        async with self._calling:
            await self._reach_in_turn(host)

    async def _reach_in_turn(self, host: str) -> None:
        for address in await self._look_up(host):
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            connection.settimeout(0.0)
            try:
                source = source_for(self._party.first, address)
                if source is not None:
                    connection.bind(source)
                async with asyncio.timeout(CONNECT_S):
                    await self._loop.sock_connect(connection, (address, self._party.port))
            except (OSError, asyncio.CancelledError) as error:  # TimeoutError is an OSError.
                connection.close()
                if isinstance(error, asyncio.CancelledError):
                    raise
                continue
            self._hear(connection, host, expected=True, called=True)
            return

    async def _look_up(self, host: str) -> list[str]:
        """Return the addresses of a host; no address of the list is looked up."""
        # Where no name server answers, that takes up to half a minute and cannot be stopped, and the threads of an executor
        # would delay the end of this process.
        if placement.is_address(host):
            return [host]
        found: asyncio.Future[list[str]] = self._loop.create_future()

        def look_up() -> None:
            addresses = placement.resolve(host)
            with suppress(RuntimeError):  # The meeting has been closed meanwhile.
                self._loop.call_soon_threadsafe(lambda: None if found.done() else found.set_result(addresses))

        threading.Thread(target=look_up, daemon=True).start()
        return await found

    def _hear(self, connection: socket.socket, address: str, *, expected: bool, called: bool) -> None:
        """Start the task that identifies a caller.

        ``expected``: whether it may be a host of the job, because its address is that of one. ``called``: whether this
        end has opened the connection.
        """
        task = self._loop.create_task(self._identify(connection, address, expected=expected, called=called))
        self._callers[task] = expected
        task.add_done_callback(self._callers.pop)

    async def _identify(self, connection: socket.socket, address: str, *, expected: bool, called: bool) -> None:
        """Run the handshake where there is a secret, and wait for the hello."""
        try:
            if self._party.secret:
                await prove(connection, self._party.secret, joins=called)
        except Unproven as error:
            self._note(f"{address} asked to take part, and was refused: {error}")
            await refuse(connection, f"this host was refused: {error}")
            return
        except (OSError, asyncio.CancelledError):
            connection.close()
            return
        channel, message = channel_over(connection, peer=address), None
        if called:  # The host there waits for a hello, like any first host.
            channel.send(self._greeting)
        until = time.monotonic() + HELLO_S
        with suppress(Lost, asyncio.CancelledError):
            while (message := channel.wait(0.0)) is None and time.monotonic() < until:
                await asyncio.sleep(POLL_S)
        if message is None:
            channel.close(flush_s=0.0)
        else:
            await self._answer(Caller(channel=channel, address=address, expected=expected, called=called), message)
