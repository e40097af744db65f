"""An array of many jobs in a real Slurm: submitted, shown, cancelled; Slurm's commands are counted.

    python -m benchmarks.growth.slurm_array 1000

The Slurm has three nodes, so nearly all jobs of the array wait. A shell that sleeps stands in for the ranks.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.growth.slurm_nodes import ManyNodes
from tests.cluster.jobs import prepare
from tests.cluster.lab import wait_for
from tests.cluster.slurm_lab import FIRST, SlurmLab

NODES = 3


def measure(count: int) -> dict[str, Any]:
    """Submit, show and cancel an array of so many jobs; return what was counted."""
    with tempfile.TemporaryDirectory() as name:
        lab = SlurmLab(Path(name))
        try:
            lab.up(NODES)
            prepare(lab.share)
            return _measure(ManyNodes(lab), lab, count)
        finally:
            lab.down()


def _measure(job: ManyNodes, lab: SlurmLab, count: int) -> dict[str, Any]:
    began = time.monotonic()
    number = job.submit(1, "--array", f"1-{count}")
    row: dict[str, Any] = {"jobs": count, "submit_s": time.monotonic() - began}
    job.count("submit")
    wait_for(lambda: len(job.started()) >= NODES, timeout_s=300, what="the first jobs")
    job.count("start")
    began = time.monotonic()
    row |= {"status": job.mtrain("status", number), "status_s": time.monotonic() - began}
    job.count("status")
    began = time.monotonic()
    row |= {"cancelled": job.mtrain("cancel", number), "cancel_s": time.monotonic() - began}
    job.count("cancel")
    wait_for(lambda: not lab.run(FIRST, ["squeue", "-h"]).strip(), timeout_s=300, what="the end of all jobs")
    row["end_s"] = time.monotonic() - began
    row["status_after"] = job.mtrain("status", number)
    job.count("status after")
    return row | {"calls": job.stages}


def main() -> None:
    row = measure(int(sys.argv[-1]))
    print(row.pop("status"), row.pop("cancelled"), row.pop("status_after"), sep="\n", file=sys.stderr)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
