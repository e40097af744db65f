"""Uploads that are wrong, by mistake or on purpose: one sentence with a status of 4xx, and the server lives on."""

import contextlib
import io
import json
import socket
import struct
import zlib
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from tests.serving.files import exported
from tests.serving.servers import Server, encoded, plain, raw_answer, serving, until

from tests.starts import starts_processes

pytest.importorskip("onnx", reason="the extra export is not installed")
LIMIT = 1_000_000


@pytest.fixture(scope="module")
@starts_processes
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    weights = exported(tmp_path_factory.mktemp("hostile") / "colours.onnx", "detection")
    flags = ("--max-body", "1", "--max-pixels", "2000000", "--timeout", "3", "--queue", "4")
    with serving(weights, *flags) as running:
        yield running
        assert running.process.poll() is None, "the server has ended"
        assert running.predict(encoded(plain((255, 0, 0)))).status_code == 200
        assert running.metric("mtrain_images_in_work") == 0
        assert running.metric("mtrain_received_bytes") == 0
        assert running.ended() == 0
        assert running.process.stderr is not None
        assert "Traceback" not in running.process.stderr.read()


def refused(response: httpx.Response) -> tuple[int, str]:
    """Return status and sentence of a refusal, which must be one line of JSON."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert "\n" not in body["error"]
    assert 400 <= response.status_code < 500, response.text
    return response.status_code, body["error"]


def form_of(form: str, **options: object) -> bytes:
    content = io.BytesIO()
    Image.fromarray(plain((250, 0, 0))).save(content, form, **options)
    return content.getvalue()


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    content = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


JPEG = form_of("JPEG")
PNG = form_of("PNG")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
NO_IMAGES = {
    "empty": (b"", 400),
    "random": (np.random.default_rng(0).bytes(5000), 415),
    "text": (b"hello", 415),
    "svg": (SVG, 415),
    "gif": (form_of("GIF"), 415),
    "tiff": (form_of("TIFF"), 415),
    "pdf": (b"%PDF-1.7 ...", 415),
    "zip": (b"PK\x03\x04" + b"\0" * 100, 415),
    "jpeg magic only": (b"\xff\xd8", 422),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], 422),
    "truncated png": (PNG[: len(PNG) // 2], 422),
    "truncated webp": (form_of("WEBP")[:40], 422),
    "truncated bmp": (form_of("BMP")[:60], 422),
    "png of no size": (png_header(0, 10), 422),
    "png without enough data": (png_header(300, 300), 422),
    "jpeg then noise": (b"\xff\xd8\xff" + np.random.default_rng(1).bytes(3000), 422),
    "tiff called png": (b"\x89PNG\r\n\x1a\n" + form_of("TIFF"), 413),
    "bomb": (png_header(60000, 60000), 413),
    "bomb of one line": (png_header(2_000_000_000, 1), 413),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_is_no_image_is_refused(server, name):
    content, status = NO_IMAGES[name]
    found, sentence = refused(server.predict(content))
    assert found == status, sentence
    assert len(sentence) < 400
    answer = server.client.post(f"{server.url}/v1/predict", files={"file": ("a.jpg", content)})
    found, sentence = refused(answer)
    assert found == status
    assert sentence.startswith("a.jpg: ")


def test_damage_in_any_byte_is_no_failure(server):
    rng = np.random.default_rng(3)
    originals = [JPEG, PNG, form_of("WEBP"), form_of("BMP"), form_of("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01")]
    statuses = set()
    for number in range(120):
        content = bytearray(originals[number % len(originals)])
        for place in rng.integers(0, len(content), 4):
            content[place] = rng.integers(0, 256)
        statuses.add(server.predict(bytes(content)).status_code)
    assert statuses <= {200, 413, 415, 422}, statuses


def unusual() -> dict[str, Image.Image]:
    grey = Image.fromarray(np.full((30, 40), 200, np.uint8))
    deep = Image.fromarray(np.full((30, 40), 40000, np.uint16))
    see_through = Image.fromarray(np.dstack([plain((250, 0, 0)), np.full((30, 40), 100, np.uint8)]))
    rgb = Image.fromarray(plain((250, 0, 0)))
    return {
        "grey.png": grey,
        "grey.jpeg": grey,
        "deep.png": deep,
        "alpha.png": see_through,
        "alpha.webp": see_through,
        "grey-alpha.png": grey.convert("LA"),
        "palette.png": rgb.convert("P"),
        "one bit.png": grey.convert("1"),
        "cmyk.jpeg": rgb.convert("CMYK"),
        "palette.bmp": rgb.convert("P"),
        "pixel.png": rgb.resize((1, 1)),
        "pixel.jpeg": rgb.resize((1, 1)),
        "line.png": rgb.resize((30000, 1)),
        "line.jpeg": rgb.resize((1, 30000)),
    }


@pytest.mark.parametrize("name", unusual())
def test_unusual_images_are_images(server, name):
    content, image = io.BytesIO(), unusual()[name]
    image.save(content, name.rpartition(".")[2].upper())
    for draw in (False, True):
        answer = server.predict(content.getvalue(), draw=draw)
        assert answer.status_code == 200, answer.text
    row = server.predict(content.getvalue()).json()["images"][0]
    assert (row["width"], row["height"]) == image.size


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("text/html", JPEG, 415),
        ("multipart/form-data", JPEG, 400),
        ("multipart/form-data; boundary=", JPEG, 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"nonsense", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n" + JPEG + b"\r\n--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--\r\n", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"; filename="a.jpg"\r\n\r\n' + JPEG[:100],
            400,
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="confidence"\r\n\r\n0.5\r\n--x--\r\n',
            400,
        ),
        ("multipart/form-data; boundary=x; charset=nonsense", b"--x\r\n" + b"a" * 9000 + b"\r\n--x--", 400),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--" + b"x" * 5000 + b"--", 400),
    ],
)
def test_malformed_requests_are_refused(server, kind, body, status):
    found, sentence = refused(server.predict(body, kind))
    assert found == status, sentence


def test_too_many_and_nested_files_are_refused(server):
    files = [("file", (f"{number}.png", PNG)) for number in range(5)]
    status, sentence = refused(server.client.post(f"{server.url}/v1/predict", files=files))
    assert (status, "more than 4 images" in sentence) == (413, True)
    status, sentence = refused(server.client.post(f"{server.url}/v1/predict?draw=true", files=files[:2]))
    assert (status, "draw" in sentence) == (400, True)


@pytest.mark.parametrize("query", ["confidence=nan", "confidence=1", "confidence=-1", "confidence=x", "draw=maybe"])
def test_wrong_values_in_the_address_are_refused(server, query):
    status, sentence = refused(server.client.post(f"{server.url}/v1/predict?{query}", content=JPEG))
    assert status == 400
    assert query.partition("=")[0] in sentence


def test_wrong_addresses_and_methods_are_refused(server):
    assert refused(server.client.get(f"{server.url}/%2e%2e/%2e%2e/etc/passwd"))[0] == 404
    assert refused(server.client.get(f"{server.url}/docs"))[0] == 404
    assert refused(server.client.get(f"{server.url}/v1/predict"))[0] == 405
    assert refused(server.client.delete(server.url))[0] == 405


def test_a_body_that_is_too_large_is_refused_with_and_without_its_length(server):
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b"\xff\xd8" + bytes(50_000)

    for size in (LIMIT + 1, 3 * LIMIT, 20 * LIMIT):  # the answer arrives although the client is still sending
        assert refused(server.predict(bytes(size)))[0] == 413
    assert refused(server.client.post(f"{server.url}/v1/predict", content=chunks()))[0] == 413
    assert refused(server.client.post(f"{server.url}/v1/predict", files={"file": ("a", bytes(LIMIT))}))[0] == 413
    with server.connected() as connection:  # announces 10 GB, and waits to be told to go on
        head = "POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert raw_answer(connection)[0] == 413
    with server.connected() as connection:  # sends without an end
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(20_000):
                connection.sendall(b"4000\r\n" + bytes(0x4000) + b"\r\n")
            pytest.fail("330 MB were taken")


def test_a_body_that_does_not_arrive_ends_in_time(server):
    with server.connected() as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n\xff\xd8")
        until(lambda: server.metric("mtrain_received_bytes") == 2)
        status, body = raw_answer(connection)
        assert status == 408
        assert "3 s" in body["error"]


def test_a_header_that_does_not_arrive_ends_too(server):
    with server.connected() as silent, server.connected() as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost:")
        for connection in (silent, slow):
            connection.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_idle_connections_of_one_address_shut_nobody_out(server):
    with contextlib.ExitStack() as stack:
        for _ in range(560):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0)))
        with httpx.Client(timeout=60) as other:
            assert other.get(f"{server.url}/healthz").status_code == 200
            assert held_connections(server) <= 130


def held_connections(server: Server) -> int:
    """Return how many connections the server holds open: 128 of the address with the idle ones, and those of the test."""
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED for each in connections)


def test_what_is_no_http_is_refused(server):
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"A" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ):
        with server.connected() as connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100)[9:12] in (b"400", b"431", b"")


def test_names_of_files_are_only_text(server):
    for name in ("../../etc/passwd", "<script>alert(1)</script>.png", "a" * 3000, "ä\u202e.png", '";\\'):
        answer = server.client.post(f"{server.url}/v1/predict", files={"file": (name, PNG)})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert len(json.loads(answer.text)["images"][0]["name"]) <= 200
