"""A real Slurm for tests, on hosts that are network namespaces of this machine; made by ``slurm.sh``."""

import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.cluster.lab import HERE, SKIP, Lab, Process, Unavailable, wait_for

SLURM = HERE / "slurm.sh"
DAEMONS = ("munged", "slurmctld", ":", "slurmd", "slurmstepd:")
"""Programs of Slurm itself; ``:`` is its slurmscriptd."""
FIRST = "node1"
"""Has slurmctld. Commands are typed there, and it is the first host of every job that takes all hosts."""

MANY = 32
"""Hosts of which each speaking to each other one would fill the kernel's table of neighbours."""


class SlurmLab(Lab):
    """A few hosts with a Slurm, from ``up`` to ``down``. Faults of hosts are those of ``Lab``."""

    def __init__(self, folder: Path, *, grace_s: int = 10, kill_wait_s: int = 30) -> None:
        super().__init__(folder)
        self._folder = folder / "slurm"
        self._state = self._folder / "hosts"
        self._times = {"SLURM_GRACE_S": str(grace_s), "SLURM_KILL_WAIT_S": str(kill_wait_s)}
        self._folder.mkdir()

    def up(self, count: int) -> None:
        """Make hosts and daemons, or mend what a fault has ended.

        Raises:
            Unavailable: this machine cannot.
        """
        if count >= MANY:
            self._times |= {"HOSTS_KNOWN": str(count), "SLURM_READY_S": str(10 * count), "SLURM_SILENCE_S": "60"}
        result = self._slurm_script("up", str(count), timeout_s=120.0 + 10.0 * count)
        if result.returncode == SKIP:
            raise Unavailable(result.stderr.strip())
        assert result.returncode == 0, result.stderr
        self._nodes = [f"node{number + 1}" for number in range(count)]

    def down(self) -> None:
        """Remove them, with everything that runs on them."""
        self._slurm_script("down", timeout_s=300.0)

    def processes(self, node: str | None = None) -> list[Process]:
        """Return the processes on one host or on all, without those of Slurm."""
        return [process for process in super().processes(node) if Path(process.words[0]).name not in DAEMONS]

    # ------------------------------------------------------------------------------------------------------------ faults
    def slurmd(self, node: str, *, up: bool) -> None:
        """Kill the daemon of a host with SIGKILL, or start it."""
        self._must("slurmd", node, "up" if up else "down")

    def ctld(self, *, up: bool) -> None:
        """Kill the controller with SIGKILL, or start it."""
        self._must("ctld", "up" if up else "down")

    # -------------------------------------------------------------------------------------------------------------- jobs
    def mtrain(self, *words: str, timeout_s: float = 120.0) -> str:
        """Output of an mtrain command on the first host, in the shared folder; it must succeed."""
        return self.run(FIRST, [sys.executable, "-m", "mtrain", *words], timeout_s=timeout_s)

    def submit(self, *words: str, hosts: int = 3, ranks: int = 1, backend: str = "ddp") -> str:
        """Submit the spec in the shared folder with ``mtrain submit``, and return the job's id."""
        placed = ("-N", str(hosts), "--nproc-per-node", str(ranks))
        output = self.mtrain("submit", "--cluster", "slurm", "--backend", backend, *placed, *words)
        return re.search(r"submitted job (\d+)", output)[1]  # type: ignore[index]

    def sbatch(self, *words: str) -> str:
        """Run ``sbatch``, and return the job's id."""
        return self.run(FIRST, ["sbatch", "--parsable", *words]).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller shows of a job: JobState, Reason, ExitCode, Restarts, NodeList ..."""
        line = self.run(FIRST, ["scontrol", "--oneliner", "show", "job", number])
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def wait(self, number: str, states: Collection[str], *, timeout_s: float = 180.0) -> dict[str, str]:
        """Wait until a job is in one of ``states``; return what the controller shows of it then.

        Raises:
            TimeoutError: it does not get there.
        """
        what = f"job {number} in {'|'.join(states)}"
        wait_for(lambda: self.job(number)["JobState"] in states, timeout_s=timeout_s, what=what)
        return self.job(number)

    def _must(self, *words: str) -> None:
        result = self._slurm_script(*words)
        assert result.returncode == 0, result.stderr

    def _slurm_script(self, *words: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        command: Sequence[str] = [str(SLURM), *words]
        return subprocess.run(
            command, env=self._environ(), cwd=self.share, check=False, capture_output=True, text=True, timeout=timeout_s
        )

    def _environ(self) -> dict[str, str]:
        environ = {**super()._environ(), **self._times}
        environ |= {"SLURM_LAB": str(self._folder), "SLURM_CONF": str(self._folder / "slurm.conf")}
        environ["HOSTS_SHARE"] += f":{self._folder}"
        # Slurm's commands of the tests' own allocation, if the tests run in one, must not reach the hosts.
        return {k: v for k, v in environ.items() if k in KEPT or not k.startswith(("SLURM_", "SBATCH_"))}


KEPT = ("SLURM_LAB", "SLURM_CONF", "SLURM_GRACE_S", "SLURM_KILL_WAIT_S")
