"""Connections of HTTP servers: who is closed where there are too many, on real sockets of several addresses."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra ui is not installed")

import uvicorn

from mtrain.system.http_connections import Limits, counted_address, protocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT_S = 60.0


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


class Server:
    """A server in a thread, whose path ``/held`` answers once ``released`` is set."""

    def __init__(self, limits: Limits) -> None:
        self.released = threading.Event()
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=protocol(limits),
            ws="none",
            lifespan="off",
            log_level="error",
            timeout_keep_alive=600,
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._sockets: list[socket.socket] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            while not self.released.is_set():
                await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    @property
    def open(self) -> int:
        return len(self._server.server_state.connections)

    @property
    def answering(self) -> int:
        return len(self._server.server_state.tasks)

    def connect(self, host: int = 1, sent: bytes = b"") -> socket.socket:
        """Open a connection from 127.0.0.<host>, which the server has seen when this returns or ``sent`` is answered."""
        connection = socket.create_connection(
            self._listener.getsockname(), timeout=WAIT_S, source_address=(f"127.0.0.{host}", 0)
        )
        connection.sendall(sent)
        self._sockets.append(connection)
        return connection

    def idle(self, host: int = 1) -> socket.socket:
        """Open a connection that has got an answer, and waits."""
        connection = self.connect(host, GET)
        assert answer(connection) == b"ok"
        return connection

    def held(self, host: int = 1) -> socket.socket:
        """Open a connection whose request is being answered."""
        before = self.answering
        connection = self.connect(host, HELD)
        until(lambda: self.answering == before + 1)
        return connection

    def __enter__(self) -> "Server":
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(self, *_: Any) -> None:
        self.released.set()
        for each in self._sockets:
            each.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._listener.close()


def answer(connection: socket.socket) -> bytes:
    """Return the body of an answer; empty if the server has closed the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\nok" not in received and (part := connection.recv(4096)):
            received += part
    return received.partition(b"\r\n\r\n")[2]


def asked_again(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        connection.sendall(GET)
    return answer(connection)


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(Server(Limits(**limits)))


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_answered(server, version):
    head = b"GET / HTTP/%b\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" % version
    with server().connect(1, head + b"0\r\n\r\n" + GET) as connection:
        answered = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert (answered.count(b"HTTP/1.1"), b"both Content-Length and Transfer-Encoding" in answered) == (1, True)


def test_an_address_that_has_its_share_loses_the_connection_that_was_idle_longest(server):
    running = server(per_address=3)
    first = [running.idle(2) for _ in range(3)]
    assert asked_again(first[0]) == b"ok"  # so that the second one has been idle for the longest time
    new = running.idle(2)
    assert [asked_again(each) for each in (*first, new)] == [b"ok", b"", b"ok", b"ok"]
    assert running.open == 3


def test_idle_connections_of_one_address_shut_nobody_out(server):
    running = server(connections=12, per_address=None)
    for _ in range(40):  # these have sent nothing at all
        running.connect(2)
    until(lambda: running.open == 12)
    others = [running.idle(host) for host in (3, 4, 3)]
    assert [asked_again(each) for each in others] == [b"ok"] * 3
    assert running.open == 12


def test_the_address_with_the_most_connections_gives_one_up_and_not_the_one_that_waited_longest(server):
    running = server(connections=4, per_address=None)
    lonely = running.idle(2)
    crowd = [running.idle(3) for _ in range(3)]
    new = running.idle(4)
    assert [asked_again(each) for each in (lonely, *crowd, new)] == [b"ok", b"", b"ok", b"ok", b"ok"]


def test_requests_that_are_answered_are_not_cut_for_new_connections(server):
    running = server(connections=8, per_address=2)
    busy = [running.held(2) for _ in range(2)]
    assert asked_again(running.connect(2)) == b""
    assert asked_again(running.connect(3)) == b"ok"
    running.released.set()
    assert [answer(each) for each in busy] == [b"ok", b"ok"]


def test_busy_connections_up_to_the_limit_of_all_are_not_cut_either(server):
    running = server(connections=2, per_address=None)
    busy = [running.held(2), running.held(3)]
    assert asked_again(running.connect(4)) == b""
    running.released.set()
    assert [answer(each) for each in busy] == [b"ok", b"ok"]


def test_an_address_has_as_many_connections_as_there_are_where_the_share_is_switched_off(server):
    running = server(per_address=None)
    assert [asked_again(each) for each in [running.idle(2) for _ in range(30)]] == [b"ok"] * 30


@pytest.mark.parametrize(
    "rest", [b"GET / HTTP/1.1\r\nHost:", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n"]
)
def test_a_request_that_never_ends_is_closed_even_where_its_client_sends_a_byte_now_and_then(server, rest):
    running = server(header_s=0.5)
    connection = running.connect(2, rest)
    until(lambda: running.open == 1)
    end = time.monotonic() + WAIT_S
    with contextlib.suppress(ConnectionError):
        while running.open and time.monotonic() < end:
            connection.sendall(b"a")
            time.sleep(0.05)
    until(lambda: running.open == 0)


@pytest.mark.parametrize(
    ("client", "counted"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (None, ""),
    ],
)
def test_a_host_counts_once_whatever_addresses_of_its_network_it_uses(client, counted):
    assert counted_address(client) == counted
