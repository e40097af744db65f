"""Values of all ranks gathered over sockets of our own: on the host, with a patience that can be chosen.

Paddle's gloo gives up on a rank that is 30 s late, which no option changes; its store takes 45 ms a call. Rank 0 saves,
scores and draws for longer than the one, and training meets in every update, too often for the other.
"""

import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any, TypeVar

from mtrain.core.serialization import packed, unpacked
from mtrain.errors import LaunchError

T = TypeVar("T")
Address = tuple[str, int]
RETRY_S = 0.05
"""Between two attempts to reach rank 0 while it starts."""
HELLO_S = 10.0
"""For what connects to say who it is."""
NONCE_BYTES = 32
SEAL_BYTES = 32
"""Of an HMAC with SHA-256."""


class PeerLost(LaunchError):
    """Another rank has gone, or did not come in time: what it left behind says why."""


class Channel:
    """A star with rank 0 in the middle. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int, *, address: Address, timeout_s: float, secret: str = "") -> None:
        """Connect all ranks; returns when they are.

        Args:
            rank: of this process.
            size: number of ranks.
            address: where rank 0 listens, known to all.
            timeout_s: how long to wait for another rank, here and in every call.
            secret: known to the ranks of this job alone: both sides of a connection prove that they know it, and every message is
                sealed with it. Empty: only what connects by mistake, such as a rank of another job, is kept out.

        Raises:
            PeerLost: another rank did not come in time.
            LaunchError: rank 0 cannot listen there.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        key = _sealed(secret.encode(), f"mtrain {address[0]}:{address[1]} {size}".encode())
        meet = _accept if rank == 0 else _reach
        self._peers = meet(address, key, rank=rank, size=size, limit=monotonic() + timeout_s)
        for peer in self._peers.values():
            peer.wait_at_most(timeout_s)

    def all_gather(self, value: T) -> list[T]:
        """Any value of every rank, ordered by rank; see ``core.serialization`` for what can be sent.

        Raises:
            PeerLost: another rank has gone, or did not come in time.
            TrainingError: another rank has sent something else.
        """
        mine = packed(value)
        if self._rank != 0:
            self._send(0, mine)
            everyone: Sequence[bytes] = unpacked(self._receive(0))
        else:
            everyone = [mine, *(self._receive(rank) for rank in sorted(self._peers))]
            together = packed(everyone)
            for rank in sorted(self._peers):
                self._send(rank, together)
        return [unpacked(theirs) for theirs in everyone]

    def close(self) -> None:
        """Let go of the sockets. No calls afterwards."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, rank: int, content: bytes) -> None:
        try:
            self._peers[rank].send(content)
        except TimeoutError as error:
            raise self._late(rank) from error
        except OSError as error:
            raise _gone(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            return self._peers[rank].receive(self._timeout_s)
        except TimeoutError as error:
            raise self._late(rank) from error
        except (EOFError, OSError) as error:
            raise _gone(rank) from error

    def _late(self, rank: int) -> PeerLost:
        return PeerLost(
            f"rank {rank} did not come to a collective within {self._timeout_s:g} s (backend.options.timeout_s); "
            "its log says what it is doing"
        )


def _gone(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} has ended; its log says why")


class Stranger(OSError):
    """What has connected does not know the secret of this job."""


@dataclass(slots=True)
class Peer:
    """A connection of which both ends know the key; every message is sealed with its number and direction."""

    connection: "Connection[bytes, bytes]"
    key: bytes
    mine: bytes
    """Direction of what this end sends."""
    sent: int = 0
    received: int = 0

    def send(self, content: bytes) -> None:
        """Send one message. Raises: ``OSError``, ``TimeoutError``."""
        seal = _sealed(self.key, self.mine + struct.pack("!Q", self.sent) + content)
        self.sent += 1
        try:
            self.connection.send_bytes(seal + content)
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises: ``OSError``, ``EOFError``, ``TimeoutError``."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        try:
            message = self.connection.recv_bytes()
        except BlockingIOError as error:
            raise TimeoutError from error
        content = message[SEAL_BYTES:]
        theirs = b"up" if self.mine == b"down" else b"down"
        expected = _sealed(self.key, theirs + struct.pack("!Q", self.received) + content)
        if not hmac.compare_digest(message[:SEAL_BYTES], expected):
            raise Stranger("a message was changed on its way")
        self.received += 1
        return content

    def wait_at_most(self, timeout_s: float) -> None:
        """Let no message that has begun wait for longer for the rest of it."""
        with socket.socket(fileno=self.connection.fileno()) as borrowed:
            _limit_waiting(borrowed, timeout_s)
            borrowed.detach()

    def close(self) -> None:
        """Let go of the connection."""
        self.connection.close()


def _sealed(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _accept(address: Address, key: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
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
                connection = _connection(listener.accept()[0])
            except TimeoutError as error:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
                raise PeerLost(f"ranks {missing} did not come to {where} in time; their logs say why") from error
            found = _greeted(connection, key, size)
            if found is None or found[0] in peers:
                connection.close()
            else:
                peers[found[0]] = found[1]
    return peers


def _greeted(connection: "Connection[bytes, bytes]", key: bytes, size: int) -> tuple[int, Peer] | None:
    """The rank that has connected; None for anything else."""
    try:
        challenge = secrets.token_bytes(NONCE_BYTES)
        connection.send_bytes(challenge)
        hello = connection.recv_bytes(4 + NONCE_BYTES + SEAL_BYTES) if connection.poll(HELLO_S) else b""
        said, proof = hello[:-SEAL_BYTES], hello[-SEAL_BYTES:]
        if len(said) != 4 + NONCE_BYTES or not hmac.compare_digest(proof, _sealed(key, b"hello" + challenge + said)):
            return None
        number = int.from_bytes(said[:4], "big")
        connection.send_bytes(_sealed(key, b"welcome" + challenge + said))
    except (EOFError, OSError):
        return None
    return (number, Peer(connection, _sealed(key, b"talk" + challenge + said), b"down")) if 0 < number < size else None


def _reach(address: Address, key: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
    """The connection of another rank to rank 0, which may not listen yet."""
    del size
    while True:
        try:
            connection = _connection(socket.create_connection(address, timeout=HELLO_S))
            try:
                return {0: _introduced(connection, key, rank=rank, limit=limit)}
            except BaseException:
                connection.close()
                raise
        except (EOFError, OSError) as error:
            if monotonic() > limit:
                raise PeerLost(
                    f"rank 0 was not reached at {address[0]}:{address[1]} in time; its log says why: {error}"
                ) from error
            sleep(RETRY_S)


def _introduced(connection: "Connection[bytes, bytes]", key: bytes, *, rank: int, limit: float) -> Peer:
    """Say who this is, and make sure that rank 0 of this job answers."""

    def heard(length: int) -> bytes:
        if not connection.poll(max(0.0, limit - monotonic())):
            raise TimeoutError("no answer")
        return connection.recv_bytes(length)

    challenge = heard(NONCE_BYTES)
    said = rank.to_bytes(4, "big") + secrets.token_bytes(NONCE_BYTES)
    connection.send_bytes(said + _sealed(key, b"hello" + challenge + said))
    if not hmac.compare_digest(heard(SEAL_BYTES), _sealed(key, b"welcome" + challenge + said)):
        raise Stranger("what answers there does not know the secret of this job")
    return Peer(connection, _sealed(key, b"talk" + challenge + said), b"up")


def _connection(connected: socket.socket) -> "Connection[bytes, bytes]":
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit_waiting(connected, HELLO_S)
    found: Any = Connection(connected.detach())
    opened: Connection[bytes, bytes] = found
    return opened


def _limit_waiting(connected: socket.socket, timeout_s: float) -> None:
    """Let the kernel end a read or write that waits for longer: it then fails with ``BlockingIOError``."""
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, name, limit)
