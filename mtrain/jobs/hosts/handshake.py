"""Mutual authentication: two hosts prove that they know a cluster's secret before either sends anything about a job.

``system.mutual_authentication`` makes and checks the proofs; the secret itself is never sent. Messages that follow on the
connection are neither authenticated nor encrypted.
"""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

from mtrain.jobs.hosts.messages import Farewell
from mtrain.system.job_secret import CLUSTER_VARIABLE
from mtrain.system.mutual_authentication import End

HANDSHAKE_EVENT = "proof"
"""Event name of every handshake message. A peer without the secret that receives one learns that this cluster requires
it."""
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


async def prove(connection: socket.socket, secret: str, *, joins: bool) -> None:
    """Run the handshake; return once both ends have proved that they know ``secret``. It takes ``PROVE_S`` at most.

    ``joins`` is True at the end that opened the connection, and False at the end that listens.

    Raises:
        Unproven: the other end does not know the secret.
        OSError: the connection failed.
    """
    connection.settimeout(0.0)  # An event loop takes no socket that blocks.
    end = End(secret.encode(errors="surrogateescape"), "joins" if joins else "leads")
    try:
        async with asyncio.timeout(PROVE_S):
            await _send(connection, {"event": HANDSHAKE_EVENT, "nonce": end.nonce})
            theirs = str((await _receive(connection)).get("nonce"))
            await _send(connection, {"event": HANDSHAKE_EVENT, "seal": end.proof(theirs)})
            proof = str((await _receive(connection)).get("seal"))
    except TimeoutError:
        raise TimeoutError("timed out") from None
    # Both have sent their proofs by now, so that an end with another secret learns the reason, and not just a closed socket.
    if not end.accepts(theirs, proof):
        raise Unproven(f"it has another {CLUSTER_VARIABLE}; {REMEDY}")


async def refuse(connection: socket.socket, reason: str) -> None:
    """Send the farewell of a leader, which a host without the secret understands as well, and close the connection."""
    with suppress(OSError), connection:
        async with asyncio.timeout(PROVE_S):
            await _send(connection, Farewell.for_refusal(reason).message())
            connection.shutdown(socket.SHUT_WR)
            # TCP resets a connection that is closed while received bytes are unread: the peer would lose the farewell.
            remaining_bytes = MAX_DRAINED_BYTES
            while remaining_bytes > 0 and (part := await asyncio.get_running_loop().sock_recv(connection, 1 << 16)):
                remaining_bytes -= len(part)


async def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(message).encode() + b"\n")


async def _receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next handshake message.

    Raises:
        Unproven: something else arrived, or the peer closed the connection.
    """
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time: the bytes after this message belong to the channel.
        byte = await asyncio.get_running_loop().sock_recv(connection, 1)
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
