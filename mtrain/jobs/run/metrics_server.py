"""A small server that answers Prometheus with the metrics of a host."""

import contextlib
import errno
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from mtrain.errors import UsageError
from mtrain.spec.hostnames import bracket_host, is_named
from mtrain.system import placement

MAX_REQUESTS = 16
"""Largest number of requests that are answered at once; a further one ends the oldest of the address that has the most."""
POLL_S = 0.05
"""Seconds between two looks for an answered request."""
REQUEST_S = 10.0
"""Seconds that a caller may take to send a request and to read the answer."""
ENDING_S = 1.0
"""Seconds that the thread of a connection which was ended may take; without a free one, the further connection is closed."""


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this host.

    Raises:
        UsageError: it cannot.
    """
    try:
        return placement.listen_at(address, port, backlog=MAX_REQUESTS)
    except OSError as error:
        shown = bracket_host(address)
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"report.metrics_port: {port} is in use on {shown}; give each job of a host a port of its own, or end what "
                "listens there"
            ) from error
        raise UsageError(
            f"report.metrics_port: no server can listen at {shown}:{port}: {error.strerror or error}; correct "
            "report.metrics_address, or give another port"
        ) from error


class MetricsServer:
    """Answers requests in threads of its own until ``close``."""

    def __init__(self, address: str, port: int, metrics: Collector, *, names: Collection[str] = ()) -> None:
        """Listen at ``address`` and answer with ``metrics``, which are collected anew for each request.

        ``names``: names by which callers may ask, besides addresses and this host's own name.

        Raises:
            UsageError: no server can listen there.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        self._server = _Server(listening(address, port), make_wsgi_app(registry), names)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def was_asked(self) -> bool:
        """Return whether anybody has asked for the metrics yet."""
        return self._server.begun > 0

    def wait_for_reader(self, *, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until a request that begins from now on has been answered; return whether one was.

        ``stop`` ends the waiting by returning True.
        """
        deadline, first = time.monotonic() + timeout_s, self._server.begun
        while self._server.answered < first and time.monotonic() < deadline and not stop():
            time.sleep(POLL_S)
        return self._server.answered >= first

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.end(self._server.connections())


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a request each few seconds is no event of the job."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, app: Any, names: Collection[str]) -> None:
        address, own = listener.getsockname(), socket.gethostname()
        self._app = app
        self._names = {"localhost", own, own.partition(".")[0], *names}
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._counting = threading.Lock()
        self._open: dict[socket.socket, tuple[str, float]] = {}
        """Connections, the oldest first: address of the caller, and when it is ended."""
        self._numbers: dict[int, int] = {}
        """Numbers of the requests that are being answered, by thread."""
        self.begun = 0
        """How many requests for the metrics have begun."""
        self.answered = -1
        """Highest number, from 0, of a request that was answered; -1: none was."""
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listener, address
        # The library would look up the host's name here, which may take long where a name server is not reached.
        self.server_name, self.server_port = address[:2]
        self.setup_environ()
        self.set_app(self._answer)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request with the metrics if its Host header names this host, see ``is_named``."""
        host, own = environ.get("HTTP_HOST", ""), socket.gethostname().partition(".")[0]
        # Only for what looks like this host's name with its domain the domain is looked up, which may take seconds.
        long_names = [socket.getfqdn()] if host.lower().startswith(f"{own.lower()}.") else []
        if not is_named(host, [*self._names, *long_names]):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [f"the Host header names another host; ask for an address of this host, or for {own}\n".encode()]
        with self._counting:
            self._numbers[threading.get_ident()], self.begun = self.begun, self.begun + 1
        return self._app(environ, start_response)

    def service_actions(self) -> None:
        """End connections whose time is over."""
        # A time-out of the socket would begin anew with each byte that drips in.
        now = time.monotonic()
        self.end([request for request, (_, ends_at) in self.connections().items() if now > ends_at])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            connections = self.connections()
            # Whoever opens many connections loses one of its own, so that Prometheus is not shut out by another address.
            crowds = Counter(address for address, _ in connections.values())
            self.end([max(connections, key=lambda each: crowds[connections[each][0]])] if connections else [])
            if not self._free.acquire(timeout=ENDING_S):
                self.shutdown_request(request)
                return
        with self._counting:
            self._open[request] = client_address[0], time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self.answered = max(self.answered, self._numbers.pop(threading.get_ident(), -1))
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        # It is forgotten first: once closed, its file descriptor can be that of another connection.
        with self._counting:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def connections(self) -> dict[socket.socket, tuple[str, float]]:
        with self._counting:
            return dict(self._open)

    def end(self, requests: Iterable[socket.socket]) -> None:
        """Wake the threads that read from connections, or write to them; each closes its own."""
        with self._counting:
            # Only the thread that answers a connection may close it, or it would read from another one with the same number.
            for request in requests:
                if self._open.pop(request, None) is not None:
                    with contextlib.suppress(OSError):  # the caller has gone away
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a caller that goes away, or sends no request, is no event of the job."""
