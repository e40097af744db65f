"""Test whether hosts reach one another over TCP: each listens at its own address, and each connects to all others."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 4.0
"""Seconds that one connection may take. A firewall that drops packets sends no error, so there must be a limit."""
TOKEN_BYTES = 16
"""Length of a listener's random word."""


class Listeners:
    """Sockets that send a random word to everyone who connects, as a proof that this host was reached and no other."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def open(self, address: str) -> tuple[int, str]:
        """Listen at ``address`` alone, on a free port; return the port and the word.

        Raises:
            OSError: the address is none of this machine's.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.bind((address, 0))
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        word = secrets.token_hex(TOKEN_BYTES)
        self._open.append(listener)
        threading.Thread(target=_serve, args=(listener, word.encode()), daemon=True).start()
        return int(listener.getsockname()[1]), word

    def close(self) -> None:
        """Stop listening. Can be called twice."""
        for listener in self._open:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            listener.close()
        self._open.clear()


def _serve(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.sendall(word)
            except OSError:
                continue


def reach(
    targets: Sequence[Mapping[str, Any]], *, source: str | None = None, timeout_s: float = TIMEOUT_S
) -> list[str]:
    """Connect to all ``targets`` (``address``, ``port``, ``word``) at once, from the address ``source``.

    Returns one text for each target, in the same order: the problem, or "" where the target was reached.
    """
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(64, len(targets))) as pool:
        return list(pool.map(lambda target: _connect(target, source, timeout_s), targets))


def _connect(target: Mapping[str, Any], source: str | None, timeout_s: float) -> str:
    word = str(target["word"]).encode()
    origin = None if source is None else (source, 0)
    try:
        with socket.create_connection((target["address"], target["port"]), timeout_s, origin) as connection:
            connection.settimeout(timeout_s)
            received = b""
            while len(received) < len(word) and (part := connection.recv(len(word) - len(received))):
                received += part
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == word else "another machine or program answers there"
