"""Measure seconds from the command to the first update on three hosts: mtrain over ssh, checks included, and the native
starter.

The native starter runs on all three hosts at once without ssh (horovodrun: over its own ssh), with the same ranks. The
two alternate, and medians are reported. Needs the hosts of ``tests/cluster/hosts.sh``. ``--picture`` draws the CPU time of each
kind of process until the first update, for the first backend, as ``docs/images/start-on-hosts.svg``.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from tests.cluster.jobs import Jobs, prepare
from tests.cluster.lab import Lab, address

HOSTS = 3
PORT = 31500
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "start-on-hosts.svg"
COLOURS = {"command": "#4c78a8", "agents": "#72b7b2", "starters": "#e45756", "ranks": "#bab0ac"}
"""Kinds of processes: the user's command; agents with their ssh; what starts the ranks of a host; ranks with their loaders."""


class CpuTimes(threading.Thread):
    """Notes the CPU seconds of each process on the hosts, ten times a second, until ``stop``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._seen: dict[psutil.Process, tuple[str, list[tuple[float, float]]]] = {}
        self.start()

    def run(self) -> None:
        """Look until ``stop``."""
        own = os.readlink("/proc/self/ns/pid")
        while not self._stopped.wait(0.1):
            for process in psutil.process_iter():
                try:
                    if os.readlink(f"/proc/{process.pid}/ns/pid") != own and (kind := kind_of(process.cmdline())):
                        times, looks = process.cpu_times(), self._seen.get(process, (kind, []))[1]
                        looks.append((time.time(), times.user + times.system))
                        # The newest kind: a copy of a starter shows the starter's words until it is a rank.
                        self._seen[process] = (kind, looks)
                except (psutil.Error, OSError):
                    continue

    def stop(self, *, until: float) -> dict[str, float]:
        """Return the CPU seconds of each kind until a time in seconds since 1970."""
        self._stopped.set()
        self.join()
        totals = dict.fromkeys(COLOURS, 0.0)
        for kind, looks in self._seen.values():
            totals[kind] += max((seconds for at, seconds in looks if at <= until), default=0.0)
        return totals


def kind_of(words: list[str]) -> str | None:
    """Return which kind of process a command line is."""
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if "mtrain.jobs.hosts.agent" in " ".join(words):
        return "agents"
    kinds = {"mtrain": "command", "mtrain.rank.worker": "ranks"}
    return kinds.get(module, "starters" if module.startswith(("mtrain.", "torch.", "paddle.")) else None)


def draw(bars: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a bar of CPU seconds for each way of starting, with a part for each kind of process."""
    import matplotlib.pyplot as plt  # only pictures need it

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.name})
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(bars) + 0.8), layout="constrained")
    names, lefts = list(bars), [0.0] * len(bars)
    for kind, colour in COLOURS.items():
        widths = [parts[kind] for parts in bars.values()]
        drawn = axes.barh(names, widths, left=lefts, color=colour, label=kind)
        axes.bar_label(drawn, [f"{width:.1f}" if width > 1 else "" for width in widths], label_type="center")
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.bar_label(drawn, [f"{left:.1f} s" for left in lefts], padding=4)
    axes.set(xticks=[], xlim=(0, 1.15 * max(lefts)))
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def first_update(run: Path, began: float) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return next(row["time"] for row in map(json.loads, lines) if row["kind"] == "update") - began


def ours(jobs: Jobs, backend: str) -> tuple[float, dict[str, float], Path]:
    """Start a job with mtrain; return the seconds to its first update, the CPU seconds of its processes, and the run folder."""
    began, cpu = time.time(), CpuTimes()
    job = jobs.over_ssh("ours", backend=backend, train__updates=1, evaluate__at_end="false")
    assert job.finish().code == 0, job.leader.text
    seconds = first_update(job.folder, began)
    return seconds, cpu.stop(until=began + seconds), job.folder


def native(lab: Lab, backend: str, like: Path) -> tuple[float, dict[str, float]]:
    """Start the same ranks natively, with the spec of the run ``like``; return seconds as ``ours`` does."""
    run = like.with_name(f"{like.name}-native")
    (run / "logs").mkdir(parents=True)
    shutil.copy(like / "spec.json", run)
    worker = ["-m", "mtrain.rank.worker", "--run-dir", str(run)]
    pinned = ["env", "GLOO_SOCKET_IFNAME=eth0", "HOROVOD_GLOO_IFACE=eth0"]
    began, cpu = time.time(), CpuTimes()
    started = [lab.start(node, [*pinned, *argv, *worker]) for node, argv in commands(backend).items()]
    for process in started:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    seconds = first_update(run, began)
    return seconds, cpu.stop(until=began + seconds)


def commands(backend: str) -> dict[str, list[str]]:
    """Return the native starter's command for each host."""
    python, nodes = sys.executable, [f"node{number + 1}" for number in range(HOSTS)]
    if backend == "horovod":
        hosts = ",".join(f"{address(node)}:1" for node in nodes)
        starter = [python, "-m", "horovod.runner.launch", "--gloo", "-np", str(HOSTS), "-H", hosts]
        return {"node1": [*starter, "--network-interfaces", "eth0", "--disable-cache", python]}
    if backend == "fleet":
        starter = [
            python,
            "-m",
            "paddle.distributed.launch",
            "--master",
            f"{address('node1')}:{PORT}",
            "--nnodes",
            str(HOSTS),
        ]
        rank_options = {node: ["--rank", str(rank), "--host", address(node)] for rank, node in enumerate(nodes)}
        tail = ["--nproc_per_node", "1", "--log_dir", "/tmp/native", python]
        return {node: [*starter, *place, *tail] for node, place in rank_options.items()}
    starter = [python, "-m", "torch.distributed.run", f"--nnodes={HOSTS}", "--nproc-per-node=1"]
    master = [f"--master-addr={address('node1')}", f"--master-port={PORT}"]
    return {node: [*starter, f"--node-rank={rank}", *master] for rank, node in enumerate(nodes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("backends", nargs="*", default=["ddp", "horovod", "deepspeed", "fleet"])
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        lab.up(HOSTS)
        jobs = Jobs(lab)
        try:
            prepare(lab.share)
            for backend in arguments.backends:
                pairs, parts = [], []
                for _ in range(arguments.runs + 1):
                    seconds, cpu, run = ours(jobs, backend)
                    peer, peer_cpu = native(lab, backend, run)
                    pairs.append((seconds, peer))
                    parts.append({"mtrain": cpu, "native starter": peer_cpu})
                    print(
                        f"{backend:<10} {seconds:.1f} {peer:.1f} s, CPU {sum(cpu.values()):.1f} {sum(peer_cpu.values()):.1f} s"
                    )
                rows.append(row(backend, pairs[1:]))
                if arguments.picture and backend == arguments.backends[0]:
                    show(parts[1:])
                print(f"{backend:<10} ours {rows[-1]['ours']:.1f} s  native {rows[-1]['peer']:.1f} s", flush=True)
        finally:
            jobs.end()
            lab.down()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


def show(rounds: list[dict[str, dict[str, float]]]) -> None:
    """Draw the medians of all rounds."""
    medians = {
        side: {kind: statistics.median(each[side][kind] for each in rounds) for kind in COLOURS} for side in rounds[0]
    }
    draw(medians, PICTURE)


def row(backend: str, pairs: list[tuple[float, float]]) -> dict[str, object]:
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(x / y for x, y in pairs)
    name = f"{backend}: command to first update, 3 hosts"
    return {"name": name, "ours": a, "peer": b, "unit": "s", "ratio": ratio, "target": None, "better": "lower"}


if __name__ == "__main__":
    main()
