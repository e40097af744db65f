"""Measure seconds from the command to the first update on three hosts: mtrain over ssh, checks included, and the native
starter.

The native starter runs on all three hosts at once without ssh (horovodrun: over its own ssh), with the same ranks. The
two alternate, and medians are reported. Needs the hosts of ``tests/cluster/hosts.sh``.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.jobs import Jobs, prepare
from tests.cluster.lab import Lab, address

HOSTS = 3
PORT = 31500


def first_update(run: Path, began: float) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return next(row["time"] for row in map(json.loads, lines) if row["kind"] == "update") - began


def ours(jobs: Jobs, backend: str) -> tuple[float, Path]:
    """Start a job with mtrain; return the seconds to its first update, and the run folder."""
    began = time.time()
    job = jobs.over_ssh("ours", backend=backend, train__updates=1, evaluate__at_end="false")
    assert job.finish().code == 0, job.leader.text
    return first_update(job.folder, began), job.folder


def native(lab: Lab, backend: str, like: Path) -> float:
    """Start the same ranks natively, with the spec of the run ``like``."""
    run = like.with_name(f"{like.name}-native")
    (run / "logs").mkdir(parents=True)
    shutil.copy(like / "spec.json", run)
    worker = ["-m", "mtrain.rank.worker", "--run-dir", str(run)]
    pinned = ["env", "GLOO_SOCKET_IFNAME=eth0", "HOROVOD_GLOO_IFACE=eth0"]
    began = time.time()
    started = [lab.start(node, [*pinned, *argv, *worker]) for node, argv in commands(backend).items()]
    for process in started:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    return first_update(run, began)


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
                pairs = []
                for _ in range(arguments.runs + 1):
                    seconds, run = ours(jobs, backend)
                    pairs.append((seconds, native(lab, backend, run)))
                rows.append(row(backend, pairs[1:]))
                print(f"{backend:<10} ours {rows[-1]['ours']:.1f} s  native {rows[-1]['peer']:.1f} s", flush=True)
        finally:
            jobs.end()
            lab.down()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


def row(backend: str, pairs: list[tuple[float, float]]) -> dict[str, object]:
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(x / y for x, y in pairs)
    name = f"{backend}: command to first update, 3 hosts"
    return {"name": name, "ours": a, "peer": b, "unit": "s", "ratio": ratio, "target": None, "better": "lower"}


if __name__ == "__main__":
    main()
