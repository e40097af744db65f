"""Strike an elastic job on three hosts with random faults, and measure the seconds that each one costs.

Needs the hosts of ``tests/cluster/hosts.sh``. Every fourth time, two hosts are struck at once. After each fault the job
must run on all hosts again, with no rank of an earlier attempt beside its own. Prints a Markdown table, and the largest
difference to a job that was not disturbed. A fault costs the seconds from the strike to the next update that had not
been made before; the seconds until all hosts take part again are printed too.

    python -m benchmarks.elastic_soak --backend ddp --faults 20 --seed 1
"""

import argparse
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.cluster.jobs import FIRST, Job, Jobs, prepare
from tests.cluster.lab import Lab, Process, wait_for
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
PAIR_EVERY = 4
"""Every so many faults, two hosts are struck at once."""
BESIDE = " & "
"""Between the names of two faults that struck together."""


def ranks(lab: Lab, node: str | None = None) -> list[Process]:
    """Return the ranks on a host or on all, their loader processes left out."""
    actual = [process for process in lab.processes(node) if process.module == "mtrain.rank.worker"]
    pids = {(process.node, process.pid) for process in actual}
    return [process for process in actual if (process.node, process.parent) not in pids]


def kill(lab: Lab, node: str) -> None:
    """Kill one rank of a host, of several the first."""
    for process in ranks(lab, node)[:1]:
        lab.kill(process, "KILL")


def kill_agent(lab: Lab, node: str) -> None:
    """Kill the agent of a host, whose ranks must not outlive it."""
    for process in lab.processes(node):
        if process.module == "mtrain.jobs.hosts.agent":
            lab.kill(process, "KILL")


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
    "kill -9 of an agent": kill_agent,
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
    "suspended for 30 s": lambda lab, node: suspend(lab, node, seconds=30),
}


def newest(job: Job) -> int:
    """Return the highest update that was made; -1 before the first."""
    return max(job.updates(), default=-1)


def strike(lab: Lab, job: Job, faults: dict[str, str]) -> float:
    """Return the seconds from faults, by host, until updates are made that had not been made before they ended."""
    began = time.monotonic()
    before = newest(job)
    threads = [threading.Thread(target=FAULTS[fault], args=(lab, node)) for node, fault in faults.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fault = BESIDE.join(faults.values())

    def went_on() -> bool:
        if job.leader.process.poll() is not None:
            raise SystemExit(f"1 job lost, after {faults}:\n{job.leader.text}")
        return newest(job) > before + 1

    wait_for(went_on, timeout_s=PATIENCE_S, what=f"an update after {fault}")
    return time.monotonic() - began


def drawn(draw: np.random.Generator, number: int) -> dict[str, str]:
    """Draw the faults that strike together, by host; in a pair, no two are alike."""
    nodes = [f"node{each}" for each in range(2, HOSTS + 1)]
    count = 2 if number % PAIR_EVERY == PAIR_EVERY - 1 else 1
    faults = draw.choice(list(FAULTS), size=count, replace=False)
    return dict(zip(draw.choice(nodes, size=count, replace=False).tolist(), faults.tolist(), strict=True))


def orphans(lab: Lab, *, each: int) -> int:
    """Return how many ranks run beyond those of the attempt on all hosts."""
    counts = Counter(process.node for process in ranks(lab))
    return sum(max(0, count - each) for count in counts.values())


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
    options: dict[str, Any] = {**VALUES, "backend": backend}
    if backend == "fleet":
        options["cluster__shards"] = 6
    job = jobs.over_ssh("soak", model__name="slow_yolov5", train__updates=100_000, more=flags, **options).reach(2)
    rows: dict[str, list[float]] = {}
    strange, per_host = 0, int(options.get("cluster__shards", HOSTS)) // HOSTS
    for number in range(faults):
        chosen, began = drawn(draw, number), time.monotonic()
        fault = "two at once" if len(chosen) > 1 else next(iter(chosen.values()))
        rows.setdefault(fault, []).append(strike(lab, job, chosen))
        settled(job)
        strange += orphans(lab, each=per_host)
        whole_s = time.monotonic() - began
        print(f"{number + 1}: {chosen}: {rows[fault][-1]:.0f} s, all hosts after {whole_s:.0f} s", flush=True)
    lab.kill(job.starter(FIRST), "TERM")
    job.leader.finish(timeout_s=PATIENCE_S)
    left = [process for process in lab.left(within_s=10.0) if process.node != FIRST]
    updates = newest(job) + 1
    calm = jobs.on_one("calm", train__updates=updates, ranks=per_host * HOSTS, more=more, **options)
    calm.finish(timeout_s=1200)
    worst = difference(arrays(calm.folder), arrays(job.folder))
    again = len(job.updates()) - len(set(job.updates()))
    print(
        f"\n{backend}: {faults} times, 0 jobs lost, {updates} updates, {again} of them made again, {strange} orphans,"
    )
    print(f"{len(left)} processes left, largest difference to an undisturbed job {worst:.1e}\n")
    print("| fault | times | seconds lost, median (largest) |\n|---|--:|--:|")
    for fault, seconds in sorted(rows.items()):
        print(f"| {fault} | {len(seconds)} | {np.median(seconds):.0f} ({max(seconds):.0f}) |")


def main() -> None:
    """Read the arguments, make the hosts, and soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ddp")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments, more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Without it the hosts would stay.
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
