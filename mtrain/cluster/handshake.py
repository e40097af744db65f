"""Mutual authentication: two hosts prove that they know a cluster's secret before either sends anything about a job.

Each end sends a fresh nonce, then an HMAC-SHA-256 of both nonces and of its own role, "joins" or "leads". The role
keeps a proof from being reflected to its sender, and the nonces keep it from being replayed later. The secret itself is
never sent. Messages that follow on the connection are neither authenticated nor encrypted.
"""

import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from mtrain.cluster.farewell import Farewell
from mtrain.system.job_secret import CLUSTER_VARIABLE

HANDSHAKE_EVENT = "proof"
"""Event name of every handshake message. A peer without the secret that receives one learns that this cluster requires
it."""
NONCE_BYTES = 32
"""Length of a nonce."""
MAX_MESSAGE_BYTES = 4096
"""Largest handshake message. A heartbeat or an unauthenticated hello may arrive in its place and must fit too."""
PROVE_S = 5.0
"""Seconds that the whole handshake may take."""
MAX_DRAINED_BYTES = 1 << 20
"""How much of what a refused peer has sent is read before its connection is closed."""
REMEDY = f"give the same {CLUSTER_VARIABLE} on every host"
"""What a user does about a failed handshake."""


class Unproven(Exception):
    """The other end did not prove that it knows the secret; the text says what it did, and what to do."""


def prove(connection: socket.socket, secret: str, *, joins: bool) -> None:
    """Run the handshake; return once both ends have proved that they know ``secret``. Blocks for ``PROVE_S`` at most.

    ``joins`` is True at the end that opened the connection, and False at the end that listens.

    Raises:
        Unproven: the other end does not know the secret.
        OSError: the connection failed.
    """
    deadline = time.monotonic() + PROVE_S
    connection.settimeout(PROVE_S)
    own = secrets.token_hex(NONCE_BYTES)
    _send(connection, {"event": HANDSHAKE_EVENT, "nonce": own})
    theirs = str(_receive(connection, deadline).get("nonce"))
    _send(connection, {"event": HANDSHAKE_EVENT, "seal": _seal(secret, own, theirs, joins=joins)})
    expected = _seal(secret, theirs, own, joins=not joins)
    if not hmac.compare_digest(
        expected.encode(), str(_receive(connection, deadline).get("seal")).encode(errors="replace")
    ):
        raise Unproven(f"it has another {CLUSTER_VARIABLE}; {REMEDY}")


def refuse(connection: socket.socket, reason: str) -> None:
    """Send the farewell of a leader, which a host without the secret understands as well, and close the connection."""
    with suppress(OSError), connection:
        connection.settimeout(PROVE_S)
        _send(connection, Farewell.refused(reason).message())
        connection.shutdown(socket.SHUT_WR)
        # TCP resets a connection that is closed while received bytes are unread, and the peer would lose the farewell.
        remaining_bytes = MAX_DRAINED_BYTES
        while remaining_bytes > 0 and (part := connection.recv(1 << 16)):
            remaining_bytes -= len(part)


def _seal(secret: str, own: str, other: str, *, joins: bool) -> str:
    """Return the proof of the end whose nonce is ``own``, in hexadecimal."""
    part = "joins" if joins else "leads"
    return hmac.new(secret.encode(errors="surrogateescape"), f"{part} {own} {other}".encode(), "sha256").hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next handshake message. ``deadline`` is in monotonic time.

    Raises:
        Unproven: something else arrived, or the peer closed the connection.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        byte = connection.recv(1)  # one at a time: the bytes after this message belong to the channel
        if not byte or len(line) > MAX_MESSAGE_BYTES:
            raise Unproven(f"it has no {CLUSTER_VARIABLE}, or another one; {REMEDY}")
        line += byte
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get("event") != HANDSHAKE_EVENT:
        raise Unproven(f"it has no {CLUSTER_VARIABLE}; {REMEDY}")
    return message
