"""What is the case on one host: the answers of its agent to the questions of ``checks``. JSON in, JSON out.

An agent keeps one ``Witness`` and hands every such question to ``Witness.answer``::

    {"do": "facts", "wanted": {...}}                           -> {"facts": collect(wanted)}
    {"do": "listen", "address": A}                             -> {"port": P, "word": W}
    {"do": "connect", "targets": [{address, port, word}...], "source": A}   -> {"reached": ["" or what is wrong, ...]}
    {"do": "files", "bucket": N}                               -> {"files": [[name, bytes], ...]}

Each answer holds ``clock`` too, the wall clock in seconds; one that could not be given holds ``error`` instead. ``QUESTIONS``
are the values of ``do``. ``wanted`` is what ``checks.wanted`` makes for this host.
"""

import glob
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mtrain.cluster.preflight import interpreter_probe
from mtrain.cluster.preflight.folder_listing import Listing, list_folder
from mtrain.cluster.preflight.reachability import Listeners, reach
from mtrain.system import environment, placement

__all__ = ["QUESTIONS", "Listeners", "Witness", "collect", "interpreter", "reach"]

QUESTIONS = ("facts", "listen", "connect", "files")
PACKAGES = (
    *("numpy", "pydantic", "pyyaml", "opencv-python-headless", "pillow", "simplejpeg", "safetensors", "scikit-learn"),
    "faster-coco-eval",
)
"""Distributions that have a say in what is computed, besides the modules that the backend needs."""
PYTHON_S = 12.0
"""For an interpreter to answer."""
HASHED_BYTES = 64 << 20
"""Of a larger file only the beginning is read."""
RESOLVE_S = 3.0
DRIVER = "/proc/driver/nvidia/gpus/*/information"


class Witness:
    """Answers questions about this host, and keeps what later ones build on. Close it when no more are asked."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listeners = Listeners()
        self._listing: Listing | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question, see above; what goes wrong becomes its ``error``."""
        try:
            found = self._look(question)
        except Exception as error:  # whatever a host cannot tell is told of it, and is no end of its agent
            found = {"error": f"{type(error).__name__}: {error}"}
        return {**found, "clock": self._clock()}

    def _look(self, question: Mapping[str, Any]) -> dict[str, Any]:
        do = question["do"]
        if do == "facts":
            facts, self._listing = _collect(question["wanted"])
            return {"facts": facts}
        if do == "listen":
            port, word = self._listeners.open(question["address"])
            return {"port": port, "word": word}
        if do == "connect":
            return {"reached": reach(question["targets"], source=question.get("source"))}
        if do == "files":
            return {"files": [] if self._listing is None else self._listing.bucket(int(question["bucket"]))}
        return {"error": f"{do!r} is none of {', '.join(QUESTIONS)}"}

    def close(self) -> None:
        """Stop listening. Can be called twice."""
        self._listeners.close()


def collect(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """All facts of this host that ``wanted`` asks for."""
    return _collect(wanted)[0]


def _collect(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], Listing | None]:
    folder = Path(wanted.get("cwd") or ".")
    environ = environment.cleaned(environment.caller())
    data, listing = _data(wanted.get("data"), folder)
    facts = {
        "host": socket.gethostname(),
        "addresses": [list(pair) for pair in placement.own_addresses()],
        "names": resolved([*wanted.get("names", ()), socket.gethostname()]),
        "python": interpreter(wanted.get("python"), wanted.get("modules", ()), folder),
        "ports": {str(port): _taken_by(wanted["address"], port) for port, _ in wanted.get("ports", ())},
        "disk": _disk(folder / wanted.get("run_dir", ".")),
        "shm": _free(Path("/dev/shm")),  # noqa: S108 - looked at only
        "devices": {"present": placement.count_devices(environ), "models": _device_models()},
        "identity": _identity(),
        "cores": placement.usable_cores(),
        "data": data,
        "files": {key: _file(folder / Path(path).expanduser()) for key, path in wanted.get("files", {}).items()},
    }
    return facts, listing


def resolved(names: Sequence[str], *, limit_s: float = RESOLVE_S) -> dict[str, list[str]]:
    """Addresses of each name as this host has them; none for one that is not known, or not within ``limit_s``.

    Where no name server answers, the system's own look-up takes up to half a minute and cannot be stopped.
    """
    found = {name: placement.resolve(name) for name in names if placement.is_address(name)}

    def look_up(name: str) -> None:
        found[name] = placement.resolve(name)

    asked = [name for name in dict.fromkeys(names) if name not in found]
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: found.get(name, []) for name in names}


# ------------------------------------------------------------------------------------------------------------- Python
def interpreter(python: str | None, modules: Sequence[str], folder: Path) -> dict[str, Any]:
    """What an interpreter has, as a program that is started in ``folder`` sees it, see `interpreter_probe.look`; or ``error``.

    ``python``: None, the one that runs this.
    """
    asked: dict[str, Any] = {"packages": list(PACKAGES), "modules": list(modules), "code": "mtrain"}
    if python is None or os.path.abspath(python) == os.path.abspath(sys.executable):
        return interpreter_probe.look(**asked)
    text = Path(interpreter_probe.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the spec names
            [python, "-c", text, json.dumps(asked)],
            capture_output=True,
            text=True,
            timeout=PYTHON_S,
            check=True,
            cwd=folder,
        )
        return dict(json.loads(done.stdout))
    except FileNotFoundError:
        missing = python if folder.is_dir() else str(folder)
        return {"error": f"{missing} is not there"}
    except OSError as error:
        return {"error": f"{python}: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not answer within {PYTHON_S:g} s"}
    except subprocess.CalledProcessError as error:
        return {"error": f"{python}: {(error.stderr.strip().splitlines() or [f'exit code {error.returncode}'])[-1]}"}
    except ValueError:
        return {"error": f"{python} does not answer as Python does"}


# -------------------------------------------------------------------------------------------------- ports, disk, devices
def _taken_by(address: str, port: int) -> str:
    """What keeps a server from ``port`` of ``address``; "" where nothing does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for place in (address, ""):  # some rendezvous listen at every address, whatever they are told
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a job has just left is free
            try:
                listener.bind((place, port))
                listener.listen(1)
            except OSError as error:
                return _listener_at(port) or error.strerror or str(error)
    return ""


def _listener_at(port: int) -> str:
    """The process that listens on a port, where this user may know."""
    try:
        found = [item for item in psutil.net_connections("tcp") if item.laddr and item.laddr.port == port]
        pid = next(item.pid for item in found if item.status == psutil.CONN_LISTEN and item.pid)
        return f"process {pid} ({psutil.Process(pid).name()}) listens there"
    except (psutil.Error, OSError, StopIteration):
        return ""


def _disk(path: Path) -> dict[str, Any]:
    """Room where a folder is, or would be made."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    return {**_free(existing), "path": str(existing), "writable": os.access(existing, os.W_OK | os.X_OK)}


def _free(path: Path) -> dict[str, Any]:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


def _identity() -> str:
    """The same for two agents on one machine; empty where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _device_models() -> list[str]:
    """Names of the accelerators as their driver has them; empty where it does not say."""
    models = []
    for file in sorted(glob.glob(DRIVER)):
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models


# --------------------------------------------------------------------------------------------------------------- files
def _data(wanted: Mapping[str, Any] | None, folder: Path) -> tuple[dict[str, Any] | None, Listing | None]:
    if wanted is None:
        return None, None
    root = folder / Path(wanted["root"]).expanduser()
    try:
        listing = list_folder(root, skip=[folder / path for path in wanted.get("skip", ())])
    except OSError as error:
        return {"root": str(root), "error": error.strerror or str(error)}, None
    return {
        "root": str(root),
        "complete": listing.complete,
        "files": len(listing.files),
        "sized": listing.sized,
        "bytes": listing.nbytes,
        "digests": listing.digests(),
    }, listing


def _file(path: Path) -> dict[str, Any]:
    """Size of a file and, up to ``HASHED_BYTES``, its digest."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            total = hashlib.sha256(file.read(HASHED_BYTES)).hexdigest() if path.is_file() else ""
    except OSError as error:
        return {"path": str(path), "error": error.strerror or str(error)}
    return {"path": str(path), "bytes": size, "digest": total}
