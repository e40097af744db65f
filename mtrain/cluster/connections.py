"""Who connects to the port at which the hosts of a job meet, before it is known whether it is one of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.cluster.channel import Channel
from mtrain.system import placement

HELLO_S = 5.0
"""For a caller to say hello."""
RESOLVE_S = 5.0
"""Between two questions for the addresses of a name: those of containers may become known late."""
MOST_LABEL = 64
"""Characters shown of what a caller says of itself."""


def printable(said: object, most: int = MOST_LABEL) -> str:
    """What a caller says, for a terminal: no control characters, no more than ``most``."""
    return "".join(letter for letter in str(said) if letter.isprintable())[:most]


def address_of(peer: Sequence[Any]) -> str:
    """The address of the other end of a connection, as people write it: without the scope that IPv6 adds."""
    return str(peer[0]).partition("%")[0]


def source_for(own: str, target: str) -> tuple[str, int] | None:
    """From which address to call ``target``, so that it knows this machine as ``own``; None: the system chooses.

    A machine may have several addresses on its way out. One that a name has only on this machine, 127.0.1.1, is no use.
    """
    there = placement.resolve(target)
    for address in placement.resolve(own):
        reaches = any((":" in address) == (":" in each) for each in there)
        near = placement.is_loopback(address) and not any(placement.is_loopback(each) for each in there)
        if reaches and not near and placement.is_own(address):
            return address, 0
    return None


class Addresses:
    """The addresses of the hosts of a job; those of names are asked for again from time to time."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._found: dict[str, tuple[float, frozenset[str]]] = {}

    def of(self, host: str, address: str) -> bool:
        """Whether ``host`` has ``address``."""
        asked, found = self._found.get(host, (float("-inf"), frozenset()))
        if address not in found and time.monotonic() - asked > RESOLVE_S:
            found = frozenset(placement.resolve(host))
            self._found[host] = time.monotonic(), found
        return address in found

    def holds(self, address: str) -> bool:
        """Whether any of the hosts has ``address``."""
        return any(self.of(host, address) for host in self._hosts)


@dataclass(kw_only=True, eq=False)
class Caller:
    """The other end of a connection that has not said hello yet."""

    channel: Channel
    address: str
    expected: bool
    """Whether it may be a host of the job: it calls from the address of one, has proved itself, or was called."""
    called: bool = False
    """Whether this end has made the connection, because others may be waiting for hosts, too."""
    until: float = field(default_factory=lambda: time.monotonic() + HELLO_S)
    """When its hello has to be there, in monotonic time."""


class Waiting:
    """Threads that each wait for something that another end of a connection says."""

    def __init__(self) -> None:
        self._threads: list[tuple[threading.Thread, bool]] = []

    def start(self, wait: Callable[..., None], *arguments: Any, expected: bool) -> None:
        """Let a thread wait; ``expected``: whether for a host of the job."""
        thread = threading.Thread(target=wait, args=arguments, daemon=True)
        self._threads.append((thread, expected))
        thread.start()

    def count(self, *, expected: bool) -> int:
        """How many wait for a host of the job, or for others."""
        self._threads = [pair for pair in self._threads if pair[0].is_alive()]
        return sum(kind == expected for _, kind in self._threads)
