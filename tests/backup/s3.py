"""A real server of S3, and a road to it that can be cut, slowed down or closed."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.ports import held_port

KEY, SECRET = "AKIATESTTESTTESTTEST", "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"
BUCKET = "checkpoints"
_REASON = b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>You may not read this</Message></Error>'
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_REASON),
    _REASON,
)


@dataclass
class Road:
    """Passes connections on to the server; a fault is what happens to them."""

    target: int
    port: int = 0
    fault: str = ""
    """"" for none; "cut": connections end after ``limit`` bytes in all; "silent": nothing is passed on any more;
    "full": every upload is refused, as where a quota is used up; "denied": objects cannot be read, and the refusal of HEAD
    has a body, too, as some servers send it."""
    limit: int = 0
    passed: int = 0
    seen: list[bytes] = field(default_factory=list)
    _listener: socket.socket = field(default_factory=socket.socket)

    def open(self) -> None:
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller, socket.create_connection(("127.0.0.1", self.target)) as server:
            back = threading.Thread(target=self._back, args=(server, caller), daemon=True)
            back.start()
            while part := caller.recv(1 << 14):
                self.seen.append(part[:200])
                if self.fault == "silent":
                    threading.Event().wait(600)
                if self.fault == "full" and part.startswith((b"PUT", b"POST")):
                    body = b"<Error><Code>QuotaExceeded</Code><Message>The quota of the bucket is used up</Message></Error>"
                    head = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: application/xml\r\nContent-Length: "
                    caller.sendall(head + str(len(body)).encode() + b"\r\n\r\n" + body)
                    caller.shutdown(socket.SHUT_WR)
                    while caller.recv(1 << 16):
                        pass
                    return
                if self.fault == "denied" and part.startswith((b"HEAD", b"GET")) and b"list-type" not in part[:200]:
                    caller.sendall(DENIED)
                    return
                self.passed += len(part)
                if self.fault == "cut" and self.passed > self.limit:
                    return
                server.sendall(part)
            server.shutdown(socket.SHUT_WR)
            back.join(60)

    def _back(self, server: socket.socket, caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := server.recv(1 << 16):
                caller.sendall(part)
            caller.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def s3() -> Iterator[tuple["Server", Road]]:
    """A server with a bucket, and the road on which clients reach it."""
    server = Server(held_port())
    server.start()
    road = Road(server.port)
    road.open()
    try:
        server.request("POST", "/moto-api/reset")
        server.request("PUT", f"/{BUCKET}")
        yield server, road
    finally:
        road.close()
        server.stop()


class Server:
    """moto's server, in a thread."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._server = None

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def request(self, method: str, path: str, data: bytes = b"") -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        head = {
            "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request",
            "Content-Type": "text/plain",
        }
        asked = urllib.request.Request(url, data=data or None, method=method, headers=head)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.read()

    def check_keys(self, on: bool) -> None:
        """Have the server refuse keys that it does not know: it knows none."""
        self.request("POST", "/moto-api/reset-auth", b"0" if on else b"inf")
