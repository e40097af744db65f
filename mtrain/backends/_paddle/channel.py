"""Gather Python values from all ranks over mtrain's own sockets, with a timeout that can be chosen.

Paddle offers two ways, and neither suffices. Its gloo gives up on a rank that is 30 s late, which no option changes,
and rank 0 saves, scores and draws for longer than that. Its store takes 45 ms per call, too slow for a call in every
update.
"""

import hmac
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any, TypeVar

from mtrain.core.ranks.serialization import pack, unpack
from mtrain.errors import LaunchError
from mtrain.system.mutual_authentication import End, named_nonce, seal

T = TypeVar("T")
Address = tuple[str, int]
RETRY_S = 0.05
"""Interval between two attempts to reach rank 0 while it starts."""
HELLO_S = 10.0
"""Time that a peer has to identify itself after connecting."""
MAX_HELLO_BYTES = 256
"""Largest message of the handshake."""
SEAL_BYTES = 32
"""Length of a seal, which is an HMAC with SHA-256."""


class PeerLost(LaunchError):
    """Another rank has ended, or did not come in time; that rank's log says why."""


class Channel:
    """Connections of rank 0 to every other rank. Every rank must make the same calls in the same order."""

    def __init__(self, rank: int, size: int, *, address: Address, timeout_s: float, secret: str = "") -> None:
        """Connect all ranks; returns when all are connected.

        Args:
            rank: Rank of this process.
            size: Number of ranks.
            address: Address at which rank 0 listens; the same on every rank.
            timeout_s: How long to wait for another rank, here and in every call.
            secret: Known only to the ranks of this job: both sides of a connection prove that they know it, and every
                message is sealed with it. If empty, only accidental connections, such as from a rank of another job,
                are rejected.

        Raises:
            PeerLost: Another rank did not come in time.
            LaunchError: Rank 0 cannot listen at ``address``.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        key = seal(secret.encode(), f"mtrain {address[0]}:{address[1]} {size}".encode())
        meet = _accept if rank == 0 else _reach
        self._peers = meet(address, key, rank=rank, size=size, limit=monotonic() + timeout_s)
        for peer in self._peers.values():
            peer.wait_at_most(timeout_s)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank; ``core.ranks.serialization`` lists the types that can be sent.

        Raises:
            PeerLost: Another rank has ended, or did not come in time.
            TrainingError: Another rank has sent something that cannot be read, or is no plain data.
        """
        own_value = pack(value)
        gathered: list[bytes]
        if self._rank != 0:
            self._send(0, own_value)
            gathered = unpack(self._receive(0))
        else:
            gathered = [own_value, *(self._receive(rank) for rank in sorted(self._peers))]
            reply = pack(gathered)
            for rank in sorted(self._peers):
                self._send(rank, reply)
            del reply
        del own_value
        # Each part is dropped as soon as it is read: the predictions of an evaluation are in memory once, not twice.
        gathered.reverse()
        return [unpack(gathered.pop()) for _ in range(len(gathered))]

    def close(self) -> None:
        """Close the sockets. The channel must not be used afterwards."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _send(self, rank: int, content: bytes) -> None:
        try:
            self._peers[rank].send(content)
        except TimeoutError as error:
            raise self._late(rank) from error
        except OSError as error:
            raise _peer_ended(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            return self._peers[rank].receive(self._timeout_s)
        except TimeoutError as error:
            raise self._late(rank) from error
        except (EOFError, OSError) as error:
            raise _peer_ended(rank) from error

    def _late(self, rank: int) -> PeerLost:
        return PeerLost(
            f"rank {rank} did not come to a collective within {self._timeout_s:g} s (backend.options.timeout_s); "
            "its log says what it is doing"
        )


def _peer_ended(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} has ended; its log says why")


class Stranger(OSError):
    """The other end of a connection does not know the secret of this job."""


@dataclass(slots=True)
class Peer:
    """An authenticated connection, whose key both ends know. Every message is sealed with its number and direction."""

    connection: "Connection[bytes, bytes]"
    key: bytes
    direction: bytes
    """Direction of the messages that this end sends: ``b"down"`` from rank 0, ``b"up"`` to it."""
    sent: int = 0
    """Number of messages sent; part of the seal, so that a message cannot be replayed."""
    received: int = 0
    """Number of messages received."""

    def send(self, content: bytes) -> None:
        """Send one message.

        Raises:
            TimeoutError: The other end did not take it within the limit of ``wait_at_most``.
            OSError: The connection is lost.
        """
        sealed = seal(self.key, self.direction + struct.pack("!Q", self.sent) + content)
        self.sent += 1
        try:
            self.connection.send_bytes(sealed + content)
        except BlockingIOError as error:
            raise TimeoutError from error

    def receive(self, timeout_s: float) -> bytes:
        """Wait for the next message and return it.

        Raises:
            TimeoutError: None began within ``timeout_s``, or the rest of it did not arrive in time.
            EOFError: The other end has closed the connection.
            OSError: The connection is lost, or the seal is wrong (``Stranger``).
        """
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        try:
            message = self.connection.recv_bytes()
        except BlockingIOError as error:
            raise TimeoutError from error
        content = message[SEAL_BYTES:]
        their_direction = b"up" if self.direction == b"down" else b"down"
        expected = seal(self.key, their_direction + struct.pack("!Q", self.received) + content)
        if not hmac.compare_digest(message[:SEAL_BYTES], expected):
            raise Stranger("a message was changed on its way")
        self.received += 1
        return content

    def wait_at_most(self, timeout_s: float) -> None:
        """Limit how long a read or write of a message that has begun may wait for the rest of it."""
        with socket.socket(fileno=self.connection.fileno()) as borrowed:
            _limit_waiting(borrowed, timeout_s)
            borrowed.detach()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def _accept(address: Address, key: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
    """Accept the connections of all other ranks on rank 0; return them by rank.

    Its signature is that of ``_reach``, so that the caller can choose between the two.
    """
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
            identified = _authenticate_rank(connection, key, size)
            if identified is None or identified[0] in peers:
                connection.close()
            else:
                peers[identified[0]] = identified[1]
    return peers


def _authenticate_rank(connection: "Connection[bytes, bytes]", key: bytes, size: int) -> tuple[int, Peer] | None:
    """Run rank 0's side of the handshake; return (rank, peer), or None if the other end is no rank of this job."""
    end = End(key, "leads")
    try:
        connection.send_bytes(end.nonce.encode())
        hello = connection.recv_bytes(MAX_HELLO_BYTES) if connection.poll(HELLO_S) else b""
        nonce, _, proof = hello.decode(errors="replace").partition(" ")
        if not end.accepts(nonce, proof):
            return None
        connection.send_bytes(end.proof(nonce).encode())
    except (EOFError, OSError):
        return None
    number = int(nonce.partition(":")[0])
    return (number, Peer(connection, end.session_key(nonce), b"down")) if 0 < number < size else None


def _reach(address: Address, key: bytes, *, rank: int, size: int, limit: float) -> dict[int, Peer]:
    """Connect this rank to rank 0, trying until ``limit`` because rank 0 may not listen yet."""
    del size
    while True:
        try:
            connection = _connection(socket.create_connection(address, timeout=HELLO_S))
            try:
                return {0: _authenticate_root(connection, key, rank=rank, limit=limit)}
            except BaseException:
                connection.close()
                raise
        except (EOFError, OSError) as error:
            if monotonic() > limit:
                raise PeerLost(
                    f"rank 0 was not reached at {address[0]}:{address[1]} in time; its log says why: {error}"
                ) from error
            sleep(RETRY_S)


def _authenticate_root(connection: "Connection[bytes, bytes]", key: bytes, *, rank: int, limit: float) -> Peer:
    """Run the other ranks' side of the handshake: identify this rank, and verify that rank 0 of this job answers."""

    def read() -> str:
        if not connection.poll(max(0.0, limit - monotonic())):
            raise TimeoutError("no answer")
        return connection.recv_bytes(MAX_HELLO_BYTES).decode(errors="replace")

    end = End(key, "joins", named_nonce(str(rank)))
    nonce = read()
    connection.send_bytes(f"{end.nonce} {end.proof(nonce)}".encode())
    if not end.accepts(nonce, read()):
        raise Stranger("what answers there does not know the secret of this job")
    return Peer(connection, end.session_key(nonce), b"up")


def _connection(connected: socket.socket) -> "Connection[bytes, bytes]":
    """Turn a connected socket into a ``multiprocessing`` connection, which frames messages."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit_waiting(connected, HELLO_S)
    untyped: Any = Connection(connected.detach())
    connection: Connection[bytes, bytes] = untyped
    return connection


def _limit_waiting(connected: socket.socket, timeout_s: float) -> None:
    """Make the kernel end reads and writes that wait for longer than ``timeout_s``, with ``BlockingIOError``."""
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, name, limit)
