"""Connections that may not be idle for ever: uvicorn's own protocol with deadlines."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
"""Seconds in which the header of a request must have arrived, unless the whole request has less."""
WRITE_S = 20.0
"""Seconds in which a client must take some of an answer that is waiting for it."""
MAX_CONNECTIONS = 512
"""Connections that may be open at once; further ones are closed at once."""


def protocol(timeout_s: float) -> type[H11Protocol]:
    """Return the protocol of a server whose requests must arrive within ``timeout_s`` seconds."""
    return type("Protocol", (DeadlineProtocol,), {"header_s": min(HEADER_S, timeout_s)})


class DeadlineProtocol(H11Protocol):
    """Closes connections whose client sends no whole header, or does not read its answer.

    The body of a request has a deadline of its own, see ``service``.
    """

    header_s = HEADER_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._end_header_timer()
        self._end_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        super().data_received(data)
        self._watch_header()

    def pause_writing(self) -> None:
        """Wait for a client that does not read, but not for ever."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        self._end_write_timer()
        super().resume_writing()

    def _watch_header(self) -> None:
        """Start the deadline of the header when the connection waits for one, and end it when one has arrived."""
        if self.conn.their_state is not h11.IDLE:
            self._end_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._close_idle)

    def _close_idle(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None
