"""Servers of predictions in processes of their own, and clients that misbehave."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    """A running `mtrain serve`."""

    process: subprocess.Popen[str]
    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def predict(self, content: bytes, kind: str = "image/jpeg", **query: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/v1/predict", content=content, headers={"content-type": kind}, params=query)

    def metric(self, name: str) -> float:
        """Return the value of a metric of /metrics, summed over its labels."""
        lines = self.client.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{|\s)", line))

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ended(self, sent: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(sent)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(weights: Path, *flags: str) -> Iterator[Server]:
    """Start a server on a free port, and end it."""
    command = [
        sys.executable,
        "-m",
        "mtrain",
        "serve",
        "--weights",
        str(weights),
        "--port",
        "0",
        "--threads",
        "1",
        *flags,
    ]
    with (
        httpx.Client(timeout=60) as client,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=weights.parent
        ) as process,
    ):
        assert process.stdout is not None
        try:
            assert ": " in process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found, process.communicate(timeout=60)
            yield Server(process, int(found[1]), client)
        finally:
            process.kill()


def until(condition: Any, *, seconds: float = 30.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def plain(colour: tuple[int, int, int], *, width: int = 40, height: int = 30) -> np.ndarray[Any, Any]:
    """Return an image of one RGB colour."""
    return np.full((height, width, 3), colour, np.uint8)


def encoded(image: np.ndarray[Any, Any], suffix: str = ".png") -> bytes:
    return bytes(cv2.imencode(suffix, image[..., ::-1])[1].tobytes())


def raw_answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Read one answer from a socket: its status and its JSON."""
    with contextlib.closing(connection.makefile("rb")) as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while (line := stream.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(stream.read(length))
