"""Connections of an HTTP server: deadlines, a share for each address, and no request whose end is ambiguous.

uvicorn's own protocol, on which this is built, waits for a client for ever, counts connections of all clients together,
and reads a request whose length is given in two ways.
"""

import asyncio
import ipaddress
import json
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
"""Seconds in which the header of a request must have arrived."""
WRITE_S = 20.0
"""Seconds in which a client must take some of an answer that is waiting for it."""
MAX_HEAD_BYTES = 16 << 10
"""Most bytes of the request line and the headers together, as h11 has it unless told otherwise."""
NETWORK_BITS = 64
"""Leading bits of an IPv6 address that count as one address: a host usually has all addresses below them."""
_MAX_REASON = 200
_REFUSAL_HEADERS = (
    (b"Content-Type", b"application/json"),
    (b"Connection", b"close"),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Cache-Control", b"no-store"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server grants its clients."""

    header_s: float = HEADER_S
    """Seconds in which the header of a request must have arrived."""
    connections: int = 512
    """Connections that may be open at once."""
    per_address: int | None = None
    """Connections that one address may have open at once; None: as many as there are."""


def protocol(limits: Limits) -> type[H11Protocol]:
    """Return the protocol of a server with these limits, for ``uvicorn.Config(http=...)``."""
    return type("Protocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(H11Protocol):
    """Closes connections whose client sends no whole header, does not read its answer, or has too many of them.

    Where there are too many, idle ones are closed first. The body of a request has no deadline here while the
    application reads it.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        largest = self.config.h11_max_incomplete_event_size
        self.conn = _StrictConnection(h11.SERVER, MAX_HEAD_BYTES if largest is None else largest)
        self.address = ""
        """Address of the client, or the part of it that counts."""
        self.idle_since = 0.0
        """Time of the event loop at which the last answer ended, or the connection began."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and no answer is being sent."""
        return not self._is_answering and not self.transport.get_write_buffer_size()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many busy ones."""
        super().connection_made(transport)
        self.address, self.idle_since = counted_address(self.client), self.loop.time()
        if self._make_room():
            self._watch_header()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._end_header_timer()
        self._end_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        super().data_received(data)
        self._watch_header()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the rest of this one where it was answered early."""
        self.idle_since = self.loop.time()
        super().on_response_complete()
        self._watch_header()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no valid request, in one sentence, and end the connection."""
        connection = cast(_StrictConnection, self.conn)
        if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            sentence = f"the request is malformed ({connection.problem}); correct the program that sent it"
            body = json.dumps({"error": sentence}).encode()
            headers = [*_REFUSAL_HEADERS, (b"Content-Length", str(len(body)).encode())]
            reason = HTTPStatus(connection.status).phrase.encode()
            head = h11.Response(status_code=connection.status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(connection.send(event) or b"")
        # Otherwise an answer to this request has begun: there is no place for another one.
        self.transport.close()

    def pause_writing(self) -> None:
        """Wait for a client that does not read, but not for ever."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        self._end_write_timer()
        super().resume_writing()

    def _make_room(self) -> bool:
        """Close an idle connection where there are too many; return whether there is room for this one."""
        others = [
            each
            for each in cast("set[BoundedProtocol]", self.connections)
            if each is not self and not each.transport.is_closing()
        ]
        counts = Counter(each.address for each in others)
        share = self.limits.per_address
        if share is not None and counts[self.address] >= share:
            crowd = [each for each in others if each.address == self.address]
        elif len(others) >= self.limits.connections:
            crowd = others
        else:
            return True
        idle = [each for each in crowd if each.is_idle]
        if not idle:
            return False
        # The address with the most connections gives one up, the one that has been idle for the longest time.
        max(idle, key=lambda each: (counts[each.address], -each.idle_since)).transport.abort()
        return True

    def _watch_header(self) -> None:
        """Start the deadline of a header when the connection waits for one, and end it when one has arrived."""
        if self._is_answering:
            self._end_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_s, self._close_idle)

    def _close_idle(self) -> None:
        self._header_timer = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.abort()

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None


class _StrictConnection(h11.Connection):
    """A connection that also refuses a request whose end a proxy before it may see at another place (RFC 9112, 6.1).

    Two programs that do not agree where a request ends take a part of it for a request of somebody else.
    """

    problem = ""
    """Why the last request was refused."""
    status = 400
    """The status of that refusal."""

    def next_event(self) -> Any:
        """Return the next event of the client.

        Raises:
            h11.RemoteProtocolError: what the client sent is no valid request.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request) and (problem := _ambiguity(event)):
                raise h11.RemoteProtocolError(problem)
        except h11.RemoteProtocolError as error:
            self.problem, self.status = str(error)[:_MAX_REASON], error.error_status_hint
            raise
        return event


def _ambiguity(request: h11.Request) -> str:
    """Return why it is not certain where a request ends; "" if it is. h11 has checked each header by itself."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return ""
    if b"content-length" in names:
        return "it has both Content-Length and Transfer-Encoding"
    return "HTTP/1.0 has no Transfer-Encoding" if request.http_version < b"1.1" else ""


def counted_address(client: tuple[str, int] | None) -> str:
    """Return what counts as the address of a client: of an IPv6 address the network that a host has to itself."""
    host = client[0].partition("%")[0] if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
        return str(address.ipv4_mapped)
    return str(address)
