"""Ports for tests, held until they are used: no other test, in this session or another one, is given the same."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

PORTS = range(20000, 30000)
"""Below those that Linux gives to outgoing connections and to servers that ask for any port."""
FOLDER = Path(tempfile.gettempdir()) / f"mtrain-test-ports-{os.getuid()}"
_HELD: dict[int, int] = {}
"""Port -> the locked file; locks end with this process."""


def held_port(address: str = "127.0.0.1") -> int:
    """A port on which nothing listens at ``address``, and which is this process's until it ends."""
    FOLDER.mkdir(exist_ok=True)
    for port in PORTS:
        if port not in _HELD and _lock(port) and _is_free(address, port):
            return port
    raise AssertionError("no port is left for tests")


def _lock(port: int) -> bool:
    descriptor = os.open(FOLDER / str(port), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _HELD[port] = descriptor
    return True


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        try:
            listener.bind((address, port))
        except OSError:
            return False
    return True
