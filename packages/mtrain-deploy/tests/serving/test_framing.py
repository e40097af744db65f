"""Requests whose end two programs may see at different places, as raw bytes: refused, and the connection ends."""

import contextlib
import re
from collections.abc import Iterator

import pytest
from tests.serving.files import exported
from tests.serving.servers import Server, raw_answer, serving

from tests.starts import starts_processes

pytest.importorskip("onnx", reason="the extra export is not installed")
POST = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
"""A second request, which must not be answered: a proxy took it for a part of the first one."""
BOTH = {
    "length first": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "encoding first": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "other letters": POST + b"CONTENT-LENGTH: 5\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
    "of no body": b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded": POST + b"Content-Length: 5\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.0": b"POST /v1/predict HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.0, kept": b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
MALFORMED = {
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "list of lengths": POST + b"Content-Length: 1, 2\r\n\r\nab",
    "signed length": POST + b"Content-Length: +2\r\n\r\nab",
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\nab",
    "empty length": POST + b"Content-Length:\r\n\r\n",
    "space before the colon": POST + b"Content-Length : 2\r\n\r\nab",
    "folded first header": b"POST /v1/predict HTTP/1.1\r\n Host: x\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "negative chunk": CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
    "prefixed chunk": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "chunk of no number": CHUNKED + b"g\r\na\r\n0\r\n\r\n",
    "chunk of 21 digits": CHUNKED + b"0" * 20 + b"1\r\na\r\n0\r\n\r\n",
    "chunk after a space": CHUNKED + b" 1\r\na\r\n0\r\n\r\n",
    "chunk that is longer than its size": CHUNKED + b"1\r\nabc\r\n0\r\n\r\n",
    "chunk whose line ends alone": CHUNKED + b"1\na\n0\n\n",
}
UNKNOWN = {
    "gzip": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
}


@pytest.fixture(scope="module")
@starts_processes
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    weights = exported(tmp_path_factory.mktemp("framing") / "colours.onnx", "detection")
    with serving(weights) as running:
        yield running
        assert running.client.get(f"{running.url}/healthz").status_code == 200
        assert running.ended() == 0
        assert running.process.stderr is not None
        assert running.process.stderr.read() == ""


def answers(server: Server, sent: bytes) -> bytes:
    """Return all that a connection answers until the server ends it."""
    with server.connected() as connection:
        connection.sendall(sent)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                parts.append(part)
    return b"".join(parts)


def statuses(answer: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)


@pytest.mark.parametrize("name", BOTH)
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_answered(server, name):
    answer = answers(server, BOTH[name] + HIDDEN)
    assert statuses(answer) == [b"400"], answer
    assert b"connection: close" in answer.lower()
    assert b"Transfer-Encoding" in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_length_or_chunk_is_refused_and_nothing_behind_it_is_answered(server, name):
    answer = answers(server, MALFORMED[name] + HIDDEN)
    assert statuses(answer) == [b"400"], answer


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_encoding_that_is_not_known_is_refused_and_nothing_behind_it_is_answered(server, name):
    answer = answers(server, UNKNOWN[name] + HIDDEN)
    assert statuses(answer) == [b"501"], answer


def test_of_two_requests_in_a_row_the_ambiguous_one_alone_is_refused(server):
    answer = answers(server, HIDDEN + BOTH["length first"] + HIDDEN)
    assert statuses(answer) == [b"200", b"400"]


def test_a_body_that_is_wrong_after_its_answer_ends_the_connection_and_fails_nothing(server):
    with server.connected() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw_answer(connection)[0] == 404
        connection.sendall(b"no chunk\r\n" + HIDDEN)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1 << 16) == b""


def test_whole_requests_in_chunks_and_with_a_length_are_answered(server):
    for body in (
        b"Content-Length: 2\r\n\r\nab",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1;x=y\r\nb\r\n0\r\n\r\n",
    ):
        with server.connected() as connection:
            connection.sendall(POST + body + HIDDEN)
            received = b""
            while len(statuses(received)) < 2 and (part := connection.recv(1 << 16)):
                received += part
        assert statuses(received) == [b"415", b"200"]
