"""The process of a server: its socket, its signals, its end."""

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from mtrain.errors import UsageError
from mtrain.system.http_connections import HEADER_S, Limits, protocol
from mtrain_deploy.serving.service import Service
from mtrain_deploy.serving.settings import ServeSettings

_BACKLOG = 512
_LAST_S = 5.0
"""Seconds after the deadline of the last request in which its answer must have been sent."""


def serve_until_asked(app: Any, settings: ServeSettings, say: Callable[[str], None]) -> int:
    """Answer requests until SIGTERM or Ctrl-C; then answer those in flight, and return the exit code.

    Args:
        app: What ``application.build`` returns.
        settings: Address and limits.
        say: Takes the lines for people: the address, and a warning where others can reach it.

    Returns:
        0: every request in flight was answered; 1: some were not.

    Raises:
        UsageError: The address cannot be used.
    """
    listener = _listener(settings.host, settings.port)
    service: Service = app.state.service
    limits = Limits(
        header_s=min(HEADER_S, settings.timeout_s), per_address=settings.max_connections_per_address or None
    )
    config = uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.timeout_s + _LAST_S),
    )
    with contextlib.closing(listener):
        server = _Server(config, service, lambda: _announce(listener, say))
        server.run(sockets=[listener])
    if server.unanswered:
        say(f"ended before {server.unanswered} requests were answered")
    return 1 if server.unanswered or service.state == "broken" else 0


class _Server(uvicorn.Server):
    """Ends without raising the signal again: being asked to end is the usual end of a server."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._announce = service, started
        self.unanswered = 0
        """Requests that were in flight and got no answer, once the server has ended."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is in flight, then end."""
        # New requests on open connections are refused while the last ones are answered.
        self._service.state = "ending"
        await super().shutdown(sockets)
        self.unanswered = len(self.server_state.tasks)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the requests in flight; at the second signal, at once."""
        # Whoever asks twice does not want to wait for requests in flight.
        self.force_exit = self.should_exit
        self.should_exit = True


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        UsageError: The address is unknown, not of this machine, in use, or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host}: {reason}; give an address of this machine, such as 127.0.0.1") from None
    # asyncio sends small parts at once only where the socket names TCP; otherwise each answer waits 40 ms for a confirmation.
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last server has just ended can be used at once; one that is in use is refused all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        remedies = {
            errno.EADDRINUSE: "choose another with --port; 0 takes a free one",
            errno.EACCES: "choose one above 1023 with --port",
            errno.EADDRNOTAVAIL: "give an address of this machine with --host",
        }
        remedy = remedies.get(error.errno or 0, "choose another address with --host and --port")
        raise UsageError(f"port {port} of {host}: {error.strerror or error}; {remedy}") from None
    return listener


def _announce(listener: socket.socket, say: Callable[[str], None]) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving at http://{shown}:{port}/ (Ctrl-C ends it)")
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        say("warning: whoever can reach this address can use the model; put a proxy with authentication before it")
