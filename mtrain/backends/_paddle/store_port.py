"""Close the port at which Paddle's store waits for ranks, once all of them are connected. Written for Paddle 3.3."""

import os
import socket
from collections.abc import Mapping

import psutil


def port_of_store(environ: Mapping[str, str]) -> int | None:
    """Return the port at which rank 0 makes Paddle's store listen; None if ``environ`` does not name it."""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return int(environ["MASTER_PORT"])
    first = environ.get("PADDLE_MASTER") or environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0]
    port = first.rpartition(":")[2]
    return int(port) if port.isdecimal() else None


def close(port: int) -> None:
    """Stop this process from accepting connections at ``port``; existing connections stay.

    Paddle's store listens on every interface, has no option for an address, and no password. One of Paddle's threads
    waits on the listening socket for as long as the process lives, so its file descriptor must stay valid: it is
    replaced by a socket on which nothing ever arrives.
    """
    quiet, other = socket.socketpair()
    other.detach()  # never closed, because the thread would then see the end of the stream
    with quiet:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                os.dup2(quiet.fileno(), connection.fd, inheritable=False)
