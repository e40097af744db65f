"""A Ray cluster for tests: several nodes on this machine, each at a loopback address of its own."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.lab import wait_for
from tests.ports import held_port

START_S = 60.0
TRIES = 3
"""How often a node is started whose own agent was too slow for it, on a machine with other work."""
SMALL = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats")


@dataclass
class RayCluster:
    """Nodes from ``up`` to ``down``; the first is the head."""

    addresses: list[str] = field(default_factory=list)
    _nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def up(self, count: int) -> None:
        """Start the head and the other nodes, one after the other: two at once would choose the same socket."""
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Paths of sockets must be short.
        self._port, self._dashboard = held_port(), held_port()
        network = f"127.{60 + os.getpid() % 40}.{os.getpid() // 40 % 250}"
        for number in range(count):
            self._add(f"{network}.{number + 2}")

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a driver, and of the nodes."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        address = f"{self.addresses[0]}:{self._port}" if self.addresses else ""
        return {**environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def job(self, *words: str) -> str:
        """Run ``ray job``; return what it prints."""
        environ = {**self.environ, "RAY_ADDRESS": f"http://127.0.0.1:{self._dashboard}"}
        process = subprocess.run([*_RAY, "job", *words], env=environ, capture_output=True, text=True, timeout=180)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def kill(self, address: str) -> None:
        """Kill the node's raylet, as the loss of its machine would."""
        for process in psutil.Process(self._nodes[address].pid).children(recursive=True):
            if process.name() == "raylet":
                process.kill()

    def down(self) -> None:
        """End all nodes, the head last."""
        for address in reversed(list(self._nodes)):
            _end(self._nodes.pop(address))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add(self, address: str) -> None:
        for attempt in range(TRIES):
            log = self._folder / f"{address}.txt"
            process = self._start(address, log)
            self._nodes[address] = process

            def up(process: "subprocess.Popen[bytes]" = process, log: Path = log) -> bool:
                return process.poll() is not None or "block forever" in log.read_text()

            wait_for(up, timeout_s=START_S, what=f"Ray's node {address}")
            if process.poll() is None:
                self.addresses.append(address)
                return
            assert attempt < TRIES - 1, log.read_text()
            _end(process)

    def _head(self) -> list[str]:
        dashboard = ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard}"]
        return [
            "--head",
            f"--port={self._port}",
            f"--temp-dir={self._folder}",
            f"--ray-client-server-port={held_port()}",
            *dashboard,
        ]

    def _start(self, address: str, log: Path) -> "subprocess.Popen[bytes]":
        place = [f"--address={self.addresses[0]}:{self._port}"] if self.addresses else self._head()
        words = [*_RAY, "start", "--block", f"--node-ip-address={address}", *place, *SMALL]
        environ = {name: value for name, value in self.environ.items() if name != "RAY_ADDRESS"}
        with log.open("wb") as output:
            return subprocess.Popen(
                words, env=environ, stdout=output, stderr=subprocess.STDOUT, cwd=self._folder, start_new_session=True
            )


_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a node: its starter, and what that leaves."""
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in below:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
