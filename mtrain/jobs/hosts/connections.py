"""Connections to the port where the hosts of a job meet, before it is known whether a host of the job called."""

import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.jobs.hosts.agent import FIRST_MESSAGE_S
from mtrain.jobs.hosts.channel import Channel
from mtrain.spec import terminal
from mtrain.system import placement

CONNECT_S = 2.0
"""Seconds that an attempt to connect may take."""
SILENT_WAIT_S = 3.0
"""Seconds of waiting before the user is told for whom."""
HELLO_S = 5.0
"""Seconds within which a caller must send its hello."""
RESOLVE_S = 5.0
"""Seconds between two name lookups of a host. They are repeated because names of containers may become known late."""
UNKNOWN_S = 0.5
"""The same for a name that has no address yet."""
MAX_LABEL = 64
"""How many characters are shown of what a caller says about itself."""


def printable(value: object, limit: int = MAX_LABEL) -> str:
    """Return a caller's value as one line that is safe to print, of at most ``limit`` characters of the caller's."""
    return terminal.one_line(value, limit=limit)


def address_of(peer: Sequence[Any]) -> str:
    """Return the address of the other end of a connection, as people write it: without the scope that IPv6 adds."""
    return str(peer[0]).partition("%")[0]


def channel_over(connection: socket.socket, *, peer: str) -> Channel:
    """Return a channel that takes over the connection."""
    # Messages are short, and each would wait for the answer to the one before (Nagle's algorithm).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    descriptor = connection.detach()
    return Channel(descriptor, descriptor, peer=peer, silence_s=FIRST_MESSAGE_S)


def source_for(own: str, target: str) -> tuple[str, int] | None:
    """Return the (address, port) to call ``target`` from, so that it sees this host's address in the list of hosts.

    ``own`` is that address. None: the system chooses, because no address of ``own`` is usable.
    """
    # A machine may have several addresses in the network of ``target``, and the system may choose one that nobody knows.
    targets = placement.resolve(target)
    for address in placement.resolve(own):
        same_family = any((":" in address) == (":" in each) for each in targets)
        # What the name means on this machine alone, such as 127.0.1.1, reaches no other one.
        only_local = placement.is_loopback(address) and not any(placement.is_loopback(each) for each in targets)
        if same_family and not only_local and placement.is_own(address):
            return address, 0
    return None


class Addresses:
    """The addresses of the hosts of a job. Names are looked up again from time to time."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._names = [host for host in hosts if not placement.is_address(host)]
        self._literal = {address_of([ipaddress.ip_address(host)]) for host in hosts if placement.is_address(host)}
        """Addresses of the hosts that are given by address, as callers have them: one look finds a caller among thousands."""
        self._lookups: dict[str, tuple[float, frozenset[str]]] = {}
        """Host -> monotonic time of the last lookup, and the addresses that it returned."""

    def of(self, host: str, address: str) -> bool:
        """Return whether ``host`` has ``address``."""
        return address in self._of(host, unless=address)

    def _of(self, host: str, *, unless: str) -> frozenset[str]:
        """Return the addresses of ``host``, looked up again now and then where ``unless`` is none of them."""
        looked_up_at, addresses = self._lookups.get(host, (float("-inf"), frozenset()))
        again_s = RESOLVE_S if addresses else UNKNOWN_S
        if unless not in addresses and time.monotonic() - looked_up_at > again_s:
            addresses = frozenset(placement.resolve(host))
            self._lookups[host] = time.monotonic(), addresses
        return addresses

    def addresses_of(self, host: str) -> Sequence[str]:
        """Return the addresses of ``host``; where there are none, no caller can be taken for it or not."""
        return sorted(self._of(host, unless=""))

    def holds(self, address: str) -> bool:
        """Return whether any of the hosts has ``address``."""
        return address in self._literal or any(self.of(host, address) for host in self._names)


@dataclass(kw_only=True, eq=False)
class Caller:
    """A connection whose other end has sent its first message."""

    channel: Channel
    address: str
    """Address of the other end."""
    expected: bool
    """Whether it may be a host of the job: its address is that of one, it has proved itself, or this end has called
    it."""
    called: bool = False
    """Whether this end opened the connection, to find out whether the host there leads the same job, too."""
