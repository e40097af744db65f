"""Facts about one host, which its agent collects to answer the questions of ``checks``. JSON in, JSON out.

An agent keeps one ``FactCollector`` and passes every such question to ``FactCollector.answer``::

    {"do": "resolve", "hosts": [...]}                          -> {"addresses": {host: [address, ...]}}
    {"do": "facts", "wanted": {...}}                           -> {"facts": collect(wanted)}
    {"do": "listen", "address": A}                             -> {"port": P, "word": W}
    {"do": "connect", "targets": [{address, port, word}...], "source": A}   -> {"reached": ["" or what is wrong, ...]}

Each answer also contains ``clock``, the wall clock in seconds since 1970. If collecting fails, ``error`` stands in
place of the result. ``QUESTIONS`` are the values of ``do``. ``wanted`` holds the requirements for this host, see
``requirements.py``.
"""

import contextlib
import glob
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from mtrain.jobs.preflight.folder_listing import list_folder
from mtrain.spec.files import open_file
from mtrain.system import environment, interpreter, names, placement

__all__ = ["QUESTIONS", "FactCollector", "Listeners", "collect", "reach"]

QUESTIONS = ("resolve", "facts", "listen", "connect")
HASHED_BYTES = 64 << 20
"""How many bytes of a file are hashed, from its beginning."""
RESOLVE_S = 3.0
"""Seconds that looking up names may take."""
DRIVER = "/proc/driver/nvidia/gpus/*/information"
"""Files in which NVIDIA's driver describes each GPU."""


class FactCollector:
    """Answers questions about this host, and keeps the listeners that later questions use. Close it at the end."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners = Listeners()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question, see the head of this file; an exception becomes the answer's ``error``."""
        try:
            facts = self._collect(question)
        except (
            Exception
        ) as error:  # A fact that cannot be collected is reported as missing; the agent must keep running.
            facts = {"error": f"{type(error).__name__}: {error}"}
        return {**facts, "clock": self._clock()}

    def _collect(self, question: Mapping[str, Any]) -> dict[str, Any]:
        do = question["do"]
        if do == "resolve":
            return {"addresses": names.look_up(question["hosts"], limit_s=RESOLVE_S)}
        if do == "facts":
            return {"facts": collect(question["wanted"])}
        if do == "listen":
            port, word = self._listeners.open(question["address"])
            return {"port": port, "word": word}
        if do == "connect":
            return {"reached": reach(question["targets"], source=question.get("source"))}
        return {"error": f"{do!r} is none of {', '.join(QUESTIONS)}"}

    def close(self) -> None:
        """Stop listening. Can be called twice."""
        self._listeners.close()


def collect(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return all facts about this host that the requirements ``wanted`` are compared with."""
    folder = Path(wanted.get("cwd") or ".")
    environ = environment.clean(environment.caller())
    return {
        "host": socket.gethostname(),
        "addresses": [list(pair) for pair in placement.own_addresses()],
        "names": names.look_up([*wanted.get("names", ()), socket.gethostname()], limit_s=RESOLVE_S),
        "python": interpreter.ask(wanted.get("python"), _modules(wanted), folder),
        "ports": {str(port): _taken_by(wanted["address"], port) for port, _ in wanted.get("ports", ())},
        "disk": _disk(folder / wanted.get("run_dir", ".")),
        "shm": _free(Path("/dev/shm")),  # noqa: S108 - only its size is read
        "devices": {"present": placement.count_devices(environ), "models": _device_models()},
        "identity": _identity(),
        "cores": placement.usable_cores(),
        "data": _data(wanted.get("data"), folder),
        "files": {key: _file(folder / Path(path).expanduser()) for key, path in wanted.get("files", {}).items()},
    }


def _modules(wanted: Mapping[str, Any]) -> list[str]:
    return [*wanted.get("modules", ()), *wanted.get("plugin_modules", ()), "mtrain_trace"]


# ------------------------------------------------------------------------------------------------- ports, disk, devices
def _taken_by(address: str, port: int) -> str:
    """Return why no server can listen at ``port`` of ``address``, or "" if one can."""
    # Some rendezvous servers listen at every address, whichever one they are given.
    for each in (address, "::" if ":" in address else "0.0.0.0"):  # noqa: S104 - closed at once
        try:
            placement.listen_at(each, port).close()
        except OSError as error:
            return _listener_at(port) or error.strerror or str(error)
    return ""


def _listener_at(port: int) -> str:
    """Name the process that listens on a port; return "" where this user may not see it."""
    try:
        sockets = [item for item in psutil.net_connections("tcp") if item.laddr and item.laddr.port == port]
        pid = next(item.pid for item in sockets if item.status == psutil.CONN_LISTEN and item.pid)
        return f"process {pid} ({psutil.Process(pid).name()}) listens there"
    except (psutil.Error, OSError, StopIteration):
        return ""


def _disk(path: Path) -> dict[str, Any]:
    """Return the free bytes of the disk on which a folder is or would be created, and whether it can be written."""
    # The run folder is made later; it will be on the disk of the nearest folder above that exists.
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    return {**_free(existing), "path": str(existing), "writable": os.access(existing, os.W_OK | os.X_OK)}


def _free(path: Path) -> dict[str, Any]:
    try:
        statistics = os.statvfs(path)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"free": statistics.f_bavail * statistics.f_frsize, "total": statistics.f_blocks * statistics.f_frsize}


def _identity() -> str:
    """Return a text that is equal for two agents on one machine and in one network namespace.

    "" where /proc lacks it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _device_models() -> list[str]:
    """Return the models of the GPUs according to NVIDIA's driver; empty where there is no such driver."""
    models = []
    for file in sorted(glob.glob(DRIVER)):
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models


# --------------------------------------------------------------------------------------------------------------- files
def _data(requirement: Mapping[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """Return facts about the data folder; None where the job reads no folder."""
    if requirement is None:
        return None
    root = folder / Path(requirement["root"]).expanduser()
    try:
        listing = list_folder(root, skip=[folder / path for path in requirement.get("skip", ())])
    except OSError as error:
        return {"root": str(root), "error": error.strerror or str(error)}
    return {
        "root": str(root),
        "complete": listing.complete,
        "files": len(listing.files),
        "sized": listing.known_sizes,
        "bytes": listing.nbytes,
        "digest": listing.digest(),
    }


def _file(path: Path) -> dict[str, Any]:
    """Return the size of a file, and the digest of its first ``HASHED_BYTES``."""
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            digest = hashlib.sha256(file.read(HASHED_BYTES)).hexdigest() if path.is_file() else ""
    except OSError as error:
        return {"path": str(path), "error": error.strerror or str(error)}
    return {"path": str(path), "bytes": size, "digest": digest}


TIMEOUT_S = 4.0
"""Seconds that one connection may take. A firewall that drops packets sends no error, so there must be a limit."""
TOKEN_BYTES = 16
"""Length of a listener's random word."""


class Listeners:
    """Sockets that send a random word to everyone who connects, as a proof that this host was reached and no other."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def open(self, address: str) -> tuple[int, str]:
        """Listen at ``address`` alone, on a free port; return the port and the word.

        Raises:
            OSError: the address is none of this machine's.
        """
        listener = placement.listen_at(address, 0, backlog=64)
        word = secrets.token_hex(TOKEN_BYTES)
        self._open.append(listener)
        threading.Thread(target=_serve, args=(listener, word.encode()), daemon=True).start()
        return int(listener.getsockname()[1]), word

    def close(self) -> None:
        """Stop listening. Can be called twice."""
        for listener in self._open:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # Closing alone does not wake a thread that waits in accept.
            listener.close()
        self._open.clear()


def _serve(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.sendall(word)
            except OSError:
                continue


def reach(
    targets: Sequence[Mapping[str, Any]], *, source: str | None = None, timeout_s: float = TIMEOUT_S
) -> list[str]:
    """Connect to all ``targets`` (``address``, ``port``, ``word``) at once, from the address ``source``.

    Returns one text for each target, in the same order: the problem, or "" where the target was reached.
    """
    if not targets:
        return []
    with ThreadPoolExecutor(max_workers=min(64, len(targets))) as pool:
        return list(pool.map(lambda target: _connect(target, source, timeout_s), targets))


def _connect(target: Mapping[str, Any], source: str | None, timeout_s: float) -> str:
    word = str(target["word"]).encode()
    origin = None if source is None else (source, 0)
    try:
        with socket.create_connection((target["address"], target["port"]), timeout_s, origin) as connection:
            connection.settimeout(timeout_s)
            received = b""
            while len(received) < len(word) and (part := connection.recv(len(word) - len(received))):
                received += part
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if received == word else "another machine or program answers there"
