"""Hosts for tests: network namespaces with addresses, sshd and process lists of their own, made by ``hosts.sh``.

node1, node2 ... have the addresses 10.77.0.1, 10.77.0.2 ...; all see one folder, ``share``, and this checkout; their
/tmp and home are their own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "hosts.sh"
SKIP = 77
"""Exit status of ``hosts.sh`` where this machine cannot have such hosts."""


class Unavailable(Exception):
    """This machine cannot have such hosts; the text says why."""


@dataclass(frozen=True)
class Process:
    """A process on a host; numbers are the host's own."""

    node: str
    pid: int
    parent: int
    state: str
    words: tuple[str, ...]

    @property
    def module(self) -> str:
        """Return the module that ``python -m`` runs; empty for other processes."""
        return self.words[self.words.index("-m") + 1] if "-m" in self.words[:-1] else ""


class Lab:
    """A few hosts, from ``up`` to ``down``."""

    def __init__(self, folder: Path) -> None:
        self.share = folder / "share"
        self.share.mkdir(parents=True)
        self._state = folder / "lab"
        self._nodes: list[str] = []

    def up(self, count: int) -> None:
        """Make them, or mend what a test has broken.

        Raises:
            Unavailable: this machine cannot.
        """
        results = self._call("up", str(count), check=False)
        if results.returncode == SKIP:
            raise Unavailable(results.stderr.strip())
        assert results.returncode == 0, results.stderr
        self._nodes = [f"node{number + 1}" for number in range(count)]

    def down(self) -> None:
        """Remove them, with everything that runs on them."""
        self._call("down")

    def mend(self) -> None:
        """Every host on, connected, reachable and without processes of a test."""
        for node in self._nodes:
            self._call("cut", node, "off", check=False)  # one that is off has no cable
            self._call("link", node, "up", check=False)
        self.up(len(self._nodes))
        for node in self._nodes:
            for process in self.processes(node):
                self.kill(process, "KILL")

    @staticmethod
    def ips(count: int) -> str:
        """Addresses of the first hosts, with commas."""
        return ",".join(address(f"node{number + 1}") for number in range(count))

    # ------------------------------------------------------------------------------------------------------ what happens
    def link(self, node: str, *, up: bool) -> None:
        """The cable."""
        self._call("link", node, "up" if up else "down")

    def cut(self, node: str, *, on: bool) -> None:
        """The switch drops everything silently."""
        self._call("cut", node, "on" if on else "off")

    def power(self, node: str, how: str) -> None:
        """``off``: nobody is told; ``halt``: its connections are closed."""
        self._call("power", node, how)

    def sshd(self, node: str, what: str) -> None:
        """``stop`` or ``start``."""
        self._call("sshd", node, what)

    # ------------------------------------------------------------------------------------------------------ what runs there
    def start(
        self, node: str, argv: Sequence[str], *, output: int | IO[str] = subprocess.PIPE
    ) -> "subprocess.Popen[str]":
        """Run a command on a host, in the shared folder. Signals sent to what is returned do not reach it."""
        return subprocess.Popen(
            [str(SCRIPT), "exec", node, *argv],
            env=self._environ(),
            cwd=self.share,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, node: str, argv: Sequence[str], *, timeout_s: float = 60) -> str:
        """Output of a command that must succeed."""
        process = self.start(node, argv)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, output
        return output

    def processes(self, node: str | None = None) -> list[Process]:
        """Return the processes on one host or on all."""
        lines = self._call("ps", *([node] if node else [])).stdout.splitlines()
        fields = [line.split() for line in lines if not line.endswith(" off")]
        return [Process(f[0], int(f[1]), int(f[2]), f[3], tuple(f[5:])) for f in fields if not f[3].startswith("Z")]

    def rank_on(self, node: str) -> Process:
        """The rank of a host that has one; its loader processes are left out."""
        actual = [process for process in self.processes(node) if process.module == "mtrain.rank.worker"]
        pids = {process.pid for process in actual}
        (rank,) = [process for process in actual if process.parent not in pids]
        return rank

    def kill(self, process: Process, signal: str) -> None:
        """Send a signal to a process; one that is gone is gone."""
        self.start(process.node, ["kill", f"-{signal}", str(process.pid)]).communicate(timeout=60)

    @contextmanager
    def listening(self, node: str, port: int) -> Iterator[None]:
        """Something else has a port of a host while inside."""
        code = f"import socket, time; s = socket.create_server(('0.0.0.0', {port})); time.sleep(600)"
        process = self.start(node, [sys.executable, "-c", code])
        wait_for(lambda: f":{port} " in self.run(node, ["ss", "-ltn"]), what="that the port is taken")
        (actual,) = [each for each in self.processes(node) if "socket.create_server" in " ".join(each.words)]
        try:
            yield
        finally:
            self.kill(actual, "KILL")
            process.communicate()

    def left(self, *, within_s: float) -> list[Process]:
        """Return the processes that still run after a while."""
        limit = time.monotonic() + within_s
        while (found := self.processes()) and time.monotonic() < limit:
            time.sleep(0.1)
        return found

    def _call(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(SCRIPT), *words],
            env=self._environ(),
            cwd=self.share,
            check=check,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def _environ(self) -> dict[str, str]:
        shared = f"{self.share}:{ROOT}:{sys.prefix}:{sys.base_prefix}"
        own = {"HOSTS_STATE": str(self._state), "HOSTS_SHARE": shared, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        return {**os.environ, **own}


def address(node: str) -> str:
    """Return the address of a host by its name."""
    return "10.77.0." + node.removeprefix("node")


def wait_for(condition: Callable[[], object], *, timeout_s: float = 120.0, what: str = "it") -> None:
    """Until a condition holds.

    Raises:
        TimeoutError: it does not.
    """
    limit = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.05)
