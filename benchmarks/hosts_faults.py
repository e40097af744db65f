"""Measure the effect of faults on a job on three hosts: seconds to its end, exit code, processes left; next to the
native starters.

Needs the hosts of ``tests/cluster/hosts.sh``. Prints a Markdown table; a cell is "seconds (exit code)", with the number
of processes left.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster import faults
from tests.cluster.faults import FAILURE_TIMEOUT_S
from tests.cluster.jobs import ENDLESS, Job, Jobs, prepare
from tests.cluster.lab import Lab, wait_for

NATIVE = ("torchrun", "horovodrun", "deepspeed", "paddle.distributed.launch")
BACKENDS = ("ddp", "horovod", "deepspeed", "fleet")
HANG_S = 75
ENDLESSLY = {"train__updates": ENDLESS, "checkpoint__every_updates": 1000}
TIMEOUT = ["--failure-timeout-s", str(FAILURE_TIMEOUT_S)]
PORT = 31234


@dataclass(frozen=True)
class Row:
    """One fault. ``native``: results of torchrun (static), horovodrun, deepspeed (pdsh) and Paddle (--master) on such
    hosts."""

    name: str
    provoke: Callable[[Lab, Jobs, str], tuple[Job, float]]
    """Starts the job; returns it, and the time of the fault."""
    native: tuple[str, str, str, str]


def struck(strike: Callable[[Lab, Job], None]) -> Callable[[Lab, Jobs, str], tuple[Job, float]]:
    """Return a function that provokes a fault in training, after three updates."""

    def provoke(lab: Lab, jobs: Jobs, backend: str) -> tuple[Job, float]:
        job = jobs.over_ssh("struck", backend=backend, more=TIMEOUT, **ENDLESSLY).reach(3)
        strike(lab, job)
        return job, time.monotonic()

    return provoke


def started(start: str, **more: object) -> Callable[[Lab, Jobs, str], tuple[Job, float]]:
    """Return a function that starts a job which cannot start."""

    def provoke(lab: Lab, jobs: Jobs, backend: str) -> tuple[Job, float]:
        began = time.monotonic()
        return getattr(jobs, start)("struck", **{"backend": backend, "more": TIMEOUT, **more}), began

    return provoke


def raising(lab: Lab, jobs: Jobs, backend: str) -> tuple[Job, float]:
    job = jobs.over_ssh("struck", backend=backend, model__name="exploding", more=TIMEOUT, **ENDLESSLY)
    wait_for(lambda: "on fire" in job.read("logs/rank-2.log"), timeout_s=180, what="the rank raised")
    return job, time.monotonic()


def port_taken(lab: Lab, jobs: Jobs, backend: str) -> tuple[Job, float]:
    with lab.listening("node1", PORT):
        job, began = started("over_ssh", more=[*TIMEOUT, "--master-port", str(PORT)])(lab, jobs, backend)
        job.finish()
    return job, began


def unreachable(lab: Lab, jobs: Jobs, backend: str) -> tuple[Job, float]:
    lab.cut("node3", on=True)
    return started("over_ssh")(lab, jobs, backend)


ROWS = (
    Row("kill -9 one rank", struck(faults.KILL.strike), ("4 (1)", "2 (1)", "7 (247)", "2 (3)")),
    Row("a rank raises", raising, ("-", "-", "-", "-")),
    Row("cable out for ever", struck(faults.SILENT[1].strike), ("HANG 16", "33 (1)", "HANG 11", "HANG 4")),
    Row("switch drops silently", struck(faults.SILENT[2].strike), ("HANG 16", "32 (1)", "HANG 11", "HANG 4")),
    Row("host powered off", struck(faults.SILENT[0].strike), ("2 (255)", "32 (1)", "HANG 10", "HANG 5")),
    Row("host halts", struck(faults.HALT.strike), ("-", "-", "-", "-")),
    Row(
        "the ssh that started a node dies", struck(faults.SSH.strike), ("ranks live on (6)", "clean", "10 live on", "-")
    ),
    Row("master port in use", port_taken, ("HANG 6", "own port", "HANG 6", "HANG 10")),
    Row("host unreachable at start", unreachable, ("HANG 5", "23 (1)", "HANG 5", "HANG 5")),
    Row("host never started by hand", started("by_hand", nodes=("node1", "node2")), ("HANG 5", "-", "-", "HANG 5")),
    Row(
        "one host has another batch size",
        started("by_hand", each={"node3": ["-o", "train.batch_size=12"]}),
        ("HANG 11", "7 (1)", "HANG 8", "54 (3)"),
    ),
    Row(
        "one host has another order of hosts",
        started("by_hand", each={"node3": ["--ips", "10.77.0.1,10.77.0.3,10.77.0.2"]}),
        ("HANG", "-", "-", "HANG"),
    ),
)


def cell(lab: Lab, row: Row, backend: str) -> str:
    """Provoke the fault once and return the table's cell."""
    jobs = Jobs(lab)
    try:
        job, began = row.provoke(lab, jobs, backend)
        wait_for(lambda: all(o.process.poll() is not None for o in job.outputs), timeout_s=HANG_S, what="the end")
        seconds = time.monotonic() - began
        reachable = ("node1", "node2")
        remaining = [p for p in lab.left(within_s=1.0) if p.node in reachable]
        print(f"   {row.name}, {backend}: {job.leader.last[0] if job.leader.last else ''}", file=sys.stderr, flush=True)
        return f"{seconds:.0f} ({job.leader.code})" + (f", {len(remaining)} left" if remaining else "")
    except TimeoutError:
        return f"HANG {len(lab.processes())}"
    except AssertionError as error:  # the job ended before the fault was provoked
        print(error, file=sys.stderr, flush=True)
        return "?"
    finally:
        jobs.end()
        lab.mend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        lab.up(4)
        try:
            prepare(lab.share)
            print(f"failure_timeout_s: {FAILURE_TIMEOUT_S}\n")
            print(f"| fault | {' | '.join(arguments.backends)} | {' | '.join(NATIVE)} |")
            print("|---" * (1 + len(arguments.backends) + len(NATIVE)) + "|")
            for row in (row for row in ROWS if row.name in arguments.rows):
                cells = [cell(lab, row, backend) for backend in arguments.backends]
                print(f"| {row.name} | {' | '.join((*cells, *row.native))} |", flush=True)
        finally:
            lab.down()


if __name__ == "__main__":
    main()
