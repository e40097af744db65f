"""Strike an elastic job on three hosts with random faults, and measure the seconds that each one costs.

Needs the hosts of ``tests/cluster/hosts.sh``. Prints a Markdown table, and the largest difference to a job that was not
disturbed. A fault costs the seconds from the strike to the next update that had not been made before.

    python -m benchmarks.elastic_soak --backend ddp --faults 20 --seed 1
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.cluster.jobs import FIRST, Job, Jobs, prepare
from tests.cluster.lab import Lab, wait_for
from tests.cluster.test_elastic import arrays, difference

HOSTS = 3
SILENCE_S = 12
"""``--failure-timeout-s`` of the job."""
VALUES = {
    "train__precision": "fp64",
    "schedule__name": "constant",
    "schedule__warmup": "null",
    "evaluate__at_end": "false",
    "cluster__rejoin_s": 1,
}
PATIENCE_S = 300.0


def kill(lab: Lab, node: str) -> None:
    """Kill one rank of a host, of several the first."""
    pids = {process.pid for process in lab.processes(node) if process.module == "mtrain.rank.worker"}
    for process in lab.processes(node):
        if process.pid in pids and process.parent not in pids:
            lab.kill(process, "KILL")
            return


def for_a_while(begin: Callable[[], None], end: Callable[[], None], *, seconds: float) -> None:
    """Make a fault last for some seconds."""
    begin()
    time.sleep(seconds)
    end()


def suspend(lab: Lab, node: str, *, seconds: float) -> None:
    """Stop every process on a host, and let them go on."""
    stopped = lab.processes(node)
    for process in stopped:
        lab.kill(process, "STOP")
    time.sleep(seconds)
    for process in stopped:
        lab.kill(process, "CONT")


def slow(lab: Lab, node: str, *, pauses: int) -> None:
    """Let a host work for half of each second."""
    for _ in range(pauses):
        suspend(lab, node, seconds=0.5)
        time.sleep(0.5)


FAULTS: dict[str, Callable[[Lab, str], None]] = {
    "kill -9 of a rank": kill,
    "halt, and on again": lambda lab, node: for_a_while(
        lambda: lab.power(node, "halt"), lambda: lab.up(HOSTS), seconds=2
    ),
    "power off, and on again": lambda lab, node: for_a_while(
        lambda: lab.power(node, "off"), lambda: lab.up(HOSTS), seconds=2
    ),
    "cable out for 5 s": lambda lab, node: for_a_while(
        lambda: lab.link(node, up=False), lambda: lab.link(node, up=True), seconds=5
    ),
    "cable out for 20 s": lambda lab, node: for_a_while(
        lambda: lab.link(node, up=False), lambda: lab.link(node, up=True), seconds=20
    ),
    "switch drops all for 20 s": lambda lab, node: for_a_while(
        lambda: lab.cut(node, on=True), lambda: lab.cut(node, on=False), seconds=20
    ),
    "slow for 5 s": lambda lab, node: slow(lab, node, pauses=5),
    "suspended for 5 s": lambda lab, node: suspend(lab, node, seconds=5),
    "suspended for 20 s": lambda lab, node: suspend(lab, node, seconds=20),
}


def newest(job: Job) -> int:
    """Return the highest update that was made; -1 before the first."""
    return max(job.updates(), default=-1)


def strike(lab: Lab, job: Job, fault: str, node: str) -> float:
    """Return the seconds from a fault until updates are made that had not been made before it ended."""
    began = time.monotonic()
    before = newest(job)
    FAULTS[fault](lab, node)

    def went_on() -> bool:
        if job.leader.process.poll() is not None:
            raise SystemExit(f"after {fault} of {node} the job ended:\n{job.leader.text}")
        return newest(job) > before + 1

    wait_for(went_on, timeout_s=PATIENCE_S, what=f"an update after {fault}")
    return time.monotonic() - began


def settled(job: Job) -> None:
    """Wait until all hosts take part again."""
    wait_for(lambda: _hosts(job) == HOSTS, timeout_s=PATIENCE_S, what=f"{HOSTS} hosts\n{job.leader.text}")
    reached = newest(job)
    wait_for(lambda: newest(job) > reached + 1, timeout_s=PATIENCE_S, what="two updates")


def _hosts(job: Job) -> int:
    """Return on how many hosts the job runs, from the last line that says so."""
    lines = [line for line in job.leader.text.splitlines() if line.startswith("starting again")]
    number = [word for line in lines[-1:] for word in line.split(" on ")[-1].split()[:1]]
    return int(number[0]) if number and number[0].isdigit() else HOSTS


def soak(lab: Lab, jobs: Jobs, *, backend: str, faults: int, seed: int, more: Sequence[str]) -> None:
    """Run one job through all faults, and compare it with one that was not disturbed."""
    draw = np.random.Generator(np.random.PCG64(seed))
    flags = ["--nnodes", "1:3", "--failure-timeout-s", str(SILENCE_S), "--max-restarts", "1000", *more]
    options = {**VALUES, "backend": backend}
    if backend == "fleet":
        options["cluster__shards"] = 6
    job = jobs.over_ssh("soak", model__name="slow_yolov5", train__updates=100_000, more=flags, **options).reach(2)
    rows: dict[str, list[float]] = {}
    for number in range(faults):
        fault, node = str(draw.choice(list(FAULTS))), f"node{draw.integers(2, HOSTS + 1)}"
        rows.setdefault(fault, []).append(strike(lab, job, fault, node))
        settled(job)
        print(f"{number + 1}: {fault} of {node}: {rows[fault][-1]:.0f} s", flush=True)
    lab.kill(job.starter(FIRST), "TERM")
    job.leader.finish(timeout_s=PATIENCE_S)
    left = [process for process in lab.left(within_s=10.0) if process.node != FIRST]
    updates = newest(job) + 1
    ranks = 6 if backend == "fleet" else HOSTS
    calm = jobs.on_one("calm", train__updates=updates, ranks=ranks, more=more, **options)
    calm.finish(timeout_s=1200)
    worst = difference(arrays(calm.folder), arrays(job.folder))
    again = len(job.updates()) - len(set(job.updates()))
    print(
        f"\n{backend}: {faults} faults, {updates} updates, {again} of them made again, {len(left)} processes left, largest"
    )
    print(
        f"difference to an undisturbed job {worst:.1e}\n\n| fault | times | seconds lost, median (largest) |\n|---|--:|--:|"
    )
    for fault, seconds in sorted(rows.items()):
        print(f"| {fault} | {len(seconds)} | {np.median(seconds):.0f} ({max(seconds):.0f}) |")


def main() -> None:
    """Read the arguments, make the hosts, and soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ddp")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        lab.up(HOSTS)
        jobs = Jobs(lab)
        try:
            prepare(lab.share)
            soak(lab, jobs, backend=arguments.backend, faults=arguments.faults, seed=arguments.seed, more=more)
        finally:
            jobs.end()
            lab.down()


if __name__ == "__main__":
    main()
