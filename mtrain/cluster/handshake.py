"""Two hosts prove to each other that they know the secret of a cluster, before either says anything of a job.

Each end sends a fresh nonce, then an HMAC-SHA-256 of both nonces and of its own part in the meeting: what one end has said proves
nothing from the other, nor another time. The secret itself is never sent. What follows on the connection is neither sealed nor
encrypted.
"""

import hmac
import json
import secrets
import socket
import time
from contextlib import suppress
from typing import Any

from mtrain.errors import UsageError
from mtrain.system.job_secret import CLUSTER_VARIABLE

EVENT = "proof"
"""Of the messages here; whoever has no secret knows by it that it needs one."""
NONCE_BYTES = 32
LIMIT_BYTES = 4096
"""Of one message; a beat of a channel, or the hello of a host without a secret, may come instead."""
PROVE_S = 5.0
"""For all of it."""
DRAINED_BYTES = 1 << 20
SAME = f"give the same {CLUSTER_VARIABLE} on every host"


class Unproven(Exception):
    """The other end does not know the secret; the text says what it did, and what to do."""


def prove(connection: socket.socket, secret: str, *, joins: bool) -> None:
    """Take part; returns once both ends have proved themselves. Blocks for ``PROVE_S`` at most.

    ``joins``: whether this end has connected to the other, which listens.

    Raises:
        Unproven: the other end could not.
        OSError: the connection failed.
    """
    limit = time.monotonic() + PROVE_S
    connection.settimeout(PROVE_S)
    own = secrets.token_hex(NONCE_BYTES)
    _send(connection, {"event": EVENT, "nonce": own})
    theirs = str(_receive(connection, limit).get("nonce"))
    _send(connection, {"event": EVENT, "seal": _seal(secret, own, theirs, joins=joins)})
    expected = _seal(secret, theirs, own, joins=not joins)
    if not hmac.compare_digest(
        expected.encode(), str(_receive(connection, limit).get("seal")).encode(errors="replace")
    ):
        raise Unproven(f"it has another {CLUSTER_VARIABLE}; {SAME}")


def refuse(connection: socket.socket, text: str) -> None:
    """Say goodbye as a leader does, which a host without a secret understands, and close."""
    with suppress(OSError), connection:
        connection.settimeout(PROVE_S)
        _send(connection, {"do": "bye", "code": UsageError.exit_code, "text": f"error: {text}"})
        connection.shutdown(socket.SHUT_WR)
        left = DRAINED_BYTES  # closed on bytes that nobody has read, a connection takes the goodbye with it
        while left > 0 and (part := connection.recv(1 << 16)):
            left -= len(part)


def _seal(secret: str, own: str, other: str, *, joins: bool) -> str:
    part = "joins" if joins else "leads"
    return hmac.new(secret.encode(errors="surrogateescape"), f"{part} {own} {other}".encode(), "sha256").hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, limit: float) -> dict[str, Any]:
    """The next message, and not a byte of what follows it; ``limit``: monotonic time."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, limit - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > LIMIT_BYTES:
            raise Unproven(f"it has no {CLUSTER_VARIABLE}, or another one; {SAME}")
        line += byte
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get("event") != EVENT:
        raise Unproven(f"it has no {CLUSTER_VARIABLE}; {SAME}")
    return message
