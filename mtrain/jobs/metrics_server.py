"""A small server that answers Prometheus with the metrics of a host."""

import errno
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from mtrain.errors import UsageError
from mtrain.spec.hostnames import bracketed

MAX_REQUESTS = 16
"""Largest number of requests that are answered at once; further connections are closed."""
POLL_S = 0.05
"""Seconds between two looks for an answered request."""
REQUEST_S = 10.0
"""Seconds that a caller may take to send a request and to read the answer."""


def listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this host.

    Raises:
        UsageError: it cannot.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Without it, a port would count as taken for a while after the job that used it has ended (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(MAX_REQUESTS)
    except OSError as error:
        listener.close()
        shown = bracketed(address)
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"report.metrics_port: {port} is in use on {shown}; give each job of a host a port of its own, or end what "
                "listens there"
            ) from error
        raise UsageError(
            f"report.metrics_port: no server can listen at {shown}:{port}: {error.strerror or error}; correct "
            "report.metrics_address, or give another port"
        ) from error
    return listener


class MetricsServer:
    """Answers requests in threads of its own until ``close``."""

    def __init__(self, address: str, port: int, metrics: Collector) -> None:
        """Listen at ``address`` and answer with ``metrics``, which are collected anew for each request.

        Raises:
            UsageError: no server can listen there.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        self._server = _Server(listening(address, port))
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> bool:
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
        """Stop listening. A request that is being answered does not delay it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a request each few seconds is no event of the job."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket) -> None:
        address = listener.getsockname()
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self._counting = threading.Lock()
        self.begun = 0
        """How many requests have begun."""
        self.answered = -1
        """Highest number, from 0, of a request that was answered; -1: none was."""
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listener, address
        # The library would look up the host's name here, which may take long where a name server is not reached.
        self.server_name, self.server_port = address[:2]
        self.setup_environ()

    def process_request(self, request: object, client_address: object) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        with self._counting:
            number, self.begun = self.begun, self.begun + 1
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            with self._counting:
                self.answered = max(self.answered, number)
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a caller that goes away, or sends no request, is no event of the job."""
