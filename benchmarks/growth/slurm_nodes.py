"""How a job of many nodes goes through a real Slurm: submitted, started, shown, cancelled; Slurm's commands are counted.

The Slurm is that of ``tests/cluster/slurm.sh``: every node is a host of its own, made of namespaces, with its own slurmd. The
leader and the agents are real. In the place of the ranks of a node one shell sleeps until it is told to end.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cluster.jobs import prepare
from tests.cluster.lab import wait_for
from tests.cluster.slurm_lab import FIRST, SlurmLab

SIZES = (3, 16, 32, 48, 64)
"""Up to 32, every node tests every other."""
COUNTED = ("sbatch", "scontrol", "squeue", "scancel", "sacct", "srun")
WRAPPER = """#!/bin/sh
echo {name} >> {calls}
exec {program} "$@"
"""
PYTHON = """#!/bin/sh
# Plays the interpreter of the ranks: the program that would start them only notes that it was started.
case " $* " in
    *" mtrain.backends._torch.ranks.starter "*) echo "$(hostname) $*" >> {started}; trap 'exit 143' TERM; sleep 3600 & wait ;;
    *) exec {python} "$@" ;;
esac
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
RANK_FLAGS = ("--nproc-per-node", "2", "--failure-timeout-s", "120")


class ManyNodes:
    """A job of many nodes in a Slurm, and what it has done so far."""

    def __init__(self, lab: SlurmLab) -> None:
        self._lab = lab
        self._calls, self._started = lab.share / "calls", lab.share / "started"
        self.stages: dict[str, dict[str, int]] = {}
        """By stage: how often each command of Slurm was called."""
        folder = lab.share / "counting"
        folder.mkdir()
        for name in COUNTED:
            program = shutil.which(name)
            self._write(folder / name, WRAPPER.format(name=name, calls=self._calls, program=program))
        self._python = lab.share / "python"
        self._write(self._python, PYTHON.format(started=self._started, python=sys.executable))
        self._path = f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def mtrain(self, *words: str) -> str:
        """Run an mtrain command on the first host; return its output."""
        argv = ["env", f"PATH={self._path}", sys.executable, "-m", "mtrain", *words]
        return self._lab.run(FIRST, argv, timeout_s=300)

    def count(self, stage: str) -> None:
        """Note the calls since the last stage."""
        calls = self._calls.read_text().split() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        self.stages[stage] = dict(Counter(calls))

    def submit(self, nodes: int, *words: str) -> str:
        """Submit the job, with further words of the command; return its id."""
        spec = ("-c", "vit.yml", "--backend", "ddp", "-o", f"train.batch_size={2 * nodes}")
        placed = (*spec, "--cluster", "slurm", "-N", str(nodes), *RANK_FLAGS)
        printed = self.mtrain("submit", *placed, "--name", "many", "-o", f"backend.python={self._python}", *words)
        found = re.search(r"submitted job (\d+)", printed)
        assert found is not None, printed
        return found[1]

    def started(self) -> list[str]:
        """Return the nodes whose ranks were started, each as often as that happened."""
        return [line.split()[0] for line in self._started.read_text().splitlines()] if self._started.exists() else []

    def printed(self, number: str) -> str:
        """Return what the job has printed so far."""
        path = self._lab.share / "runs" / ".submitted" / "many" / f"slurm-{number}.out"
        return path.read_text() if path.exists() else ""

    def leader_cpu_s(self) -> float:
        """Return the CPU time of the process that leads the job."""
        (leader,) = [each for each in self._lab.processes(FIRST) if each.module == "mtrain" and "train" in each.words]
        stat = self._lab.run(FIRST, ["cat", f"/proc/{leader.pid}/stat"]).rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / 100


def measure(nodes: int) -> dict[str, Any]:
    """Run a job of so many nodes to its end; return what was counted."""
    with tempfile.TemporaryDirectory() as name:
        lab = SlurmLab(Path(name))
        try:
            lab.up(nodes)
            prepare(lab.share)
            return _measure(ManyNodes(lab), lab, nodes)
        finally:
            lab.down()


def _measure(job: ManyNodes, lab: SlurmLab, nodes: int) -> dict[str, Any]:
    began = time.monotonic()
    number = job.submit(nodes)
    job.count("submit")

    def all_started() -> bool:
        assert lab.job(number)["JobState"] not in ENDED, job.printed(number)
        return len(job.started()) >= nodes

    wait_for(all_started, timeout_s=300, what="the start of all nodes")
    row: dict[str, Any] = {"nodes": nodes, "start_s": time.monotonic() - began, "started": sorted(job.started())}
    time.sleep(2.0)
    row["start_cpu_s"] = job.leader_cpu_s()
    job.count("start")
    row |= {
        "status": job.mtrain("status", number),
        "listed": json.loads(job.mtrain("status", "--json", number))["hosts"],
    }
    job.count("status, twice")
    row["node_list"] = lab.job(number)["NodeList"]
    asked = time.monotonic()
    row["cancelled"] = job.mtrain("cancel", number)
    row["state"] = lab.wait(number, ENDED)["JobState"]
    row["end_s"] = time.monotonic() - asked
    job.count("cancel and end")
    return row | {"calls": job.stages, "printed": job.printed(number)}


def main() -> None:
    row = measure(int(sys.argv[-1]))
    print(row.pop("printed"), row.pop("status"), row.pop("cancelled"), sep="\n", file=sys.stderr)
    started, listed = row.pop("started"), row.pop("listed")
    calls = {f"{stage}: {name}": count for stage, counts in row.pop("calls").items() for name, count in counts.items()}
    print(json.dumps({**row, "started": len(started), "hosts_listed": len(listed), **calls}))


if __name__ == "__main__":
    main()
