"""Values of all ranks gathered over sockets of our own: on the host, with a patience that can be chosen.

Paddle's gloo gives up on a rank that is 30 s late, which no option changes; its store takes 45 ms a call. Rank 0 saves,
scores and draws for longer than the one, and training meets in every update, too often for the other.
"""

import pickle
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any, TypeAlias, TypeVar

from mtrain.core.errors import LaunchError

T = TypeVar("T")
Address = tuple[str, int]
Peer: TypeAlias = "Connection[bytes, bytes]"
RETRY_S = 0.05
"""Between two attempts to reach rank 0 while it starts."""
HELLO_S = 10.0
"""For what connects to say who it is."""
WELCOME = b"welcome"


class PeerLost(LaunchError):
    """Another rank has gone, or did not come in time: what it left behind says why."""


class Channel:
    """A star with rank 0 in the middle. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int, *, address: Address, timeout_s: float) -> None:
        """Connect all ranks; returns when they are.

        Args:
            rank: of this process.
            size: number of ranks.
            address: where rank 0 listens, known to all.
            timeout_s: how long to wait for another rank, here and in every call.

        Raises:
            PeerLost: another rank did not come in time.
            LaunchError: rank 0 cannot listen there.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        # No secret: it keeps out what knocks by mistake, such as a rank of another job.
        word = f"mtrain {address[0]}:{address[1]} {size} ".encode()
        meet = _accept if rank == 0 else _reach
        self._peers = meet(address, word, rank=rank, size=size, limit=monotonic() + timeout_s)

    def all_gather(self, value: T) -> list[T]:
        """Any picklable value of every rank, ordered by rank.

        Raises:
            PeerLost: another rank has gone, or did not come in time.
        """
        mine = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        if self._rank != 0:
            self._send(0, mine)
            everyone: Sequence[bytes] = pickle.loads(self._receive(0))  # noqa: S301 - of this job, as below
        else:
            everyone = [mine, *(self._receive(rank) for rank in sorted(self._peers))]
            together = pickle.dumps(everyone, protocol=pickle.HIGHEST_PROTOCOL)
            for rank in sorted(self._peers):
                self._send(rank, together)
        return [pickle.loads(theirs) for theirs in everyone]  # noqa: S301

    def close(self) -> None:
        """Let go of the sockets. No calls afterwards."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, rank: int, content: bytes) -> None:
        try:
            self._peers[rank].send_bytes(content)
        except OSError as error:
            raise _gone(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            if not self._peers[rank].poll(self._timeout_s):
                raise PeerLost(
                    f"rank {rank} did not come to a collective within {self._timeout_s:g} s (backend.options.timeout_s); "
                    "its log says what it is doing"
                )
            return self._peers[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise _gone(rank) from error


def _gone(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} has ended; its log says why")


def _accept(address: Address, word: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
    """Rank 0's connections to all others, by rank."""
    del rank
    peers: dict[int, Peer] = {}
    where = f"{address[0]}:{address[1]}"
    try:
        listener = socket.create_server(address, backlog=size)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on {where}: {error.strerror}; start again, or choose other ports with --start-port"
        ) from error
    with listener:
        while len(peers) < size - 1:
            listener.settimeout(max(0.0, limit - monotonic()) or RETRY_S)
            try:
                peer = _connection(listener.accept()[0])
            except TimeoutError as error:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                raise PeerLost(f"ranks {missing} did not come to {where} in time; their logs say why") from error
            if (other := _greeted(peer, word, size)) is not None:
                peers[other] = peer
    return peers


def _greeted(peer: Peer, word: bytes, size: int) -> int | None:
    """The rank that has connected; None for anything else, which is sent away."""
    try:
        hello = peer.recv_bytes(len(word) + 16) if peer.poll(HELLO_S) else b""
        number = hello.removeprefix(word)
        if hello.startswith(word) and number.isdigit() and 0 < int(number) < size:
            peer.send_bytes(WELCOME)
            return int(number)
    except (EOFError, OSError):
        pass
    peer.close()
    return None


def _reach(address: Address, word: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
    """The connection of another rank to rank 0, which may not listen yet."""
    del size
    while True:
        try:
            peer = _connection(socket.create_connection(address, timeout=HELLO_S))
            peer.send_bytes(word + str(rank).encode())
            if peer.poll(max(0.0, limit - monotonic())) and peer.recv_bytes(len(WELCOME)) == WELCOME:
                return {0: peer}
            raise TimeoutError("no answer")
        except (EOFError, OSError) as error:
            if monotonic() > limit:
                raise PeerLost(
                    f"rank 0 was not reached at {address[0]}:{address[1]} in time; its log says why: {error}"
                ) from error
            sleep(RETRY_S)


def _connection(connected: socket.socket) -> Peer:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer: Any = Connection(connected.detach())
    found: Peer = peer
    return found
