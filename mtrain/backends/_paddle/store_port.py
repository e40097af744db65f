"""The port at which Paddle's store waits for ranks: closed once all of them have come. Seen with Paddle 3.3."""

import os
import socket
from collections.abc import Mapping

import psutil


def port_of_store(environ: Mapping[str, str]) -> int | None:
    """The port at which rank 0 makes Paddle's store listen; None: ``environ`` does not say."""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return int(environ["MASTER_PORT"])
    first = environ.get("PADDLE_MASTER") or environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0]
    port = first.rpartition(":")[2]
    return int(port) if port.isdecimal() else None


def close(port: int) -> None:
    """Let nobody else connect to ``port`` of this process; connections that exist stay.

    Paddle's store listens on every interface, takes no address to listen at, and has no password. A thread of Paddle's waits
    on the listening socket for as long as the process lives, so its number has to stay: a socket on which nothing ever
    arrives takes its place.
    """
    quiet, other = socket.socketpair()
    other.detach()  # never closed: the thread would be told that the other end has gone
    with quiet:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                os.dup2(quiet.fileno(), connection.fd, inheritable=False)
