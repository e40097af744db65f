"""The pods of a job are played on hosts of a lab: their command, environment, folders and late names; no kubelet is there."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.jobs import Job, Jobs, Output
from tests.cluster.lab import Lab, Process, address
from tests.cluster.test_lab_jobs import BACKENDS, SAME

pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
from tests.clusters.manifests import Pod, pods

UPDATES = 30
VALUES = {"train__updates": UPDATES, "evaluate__at_end": "false", "checkpoint__every_updates": UPDATES}
"""Of the spec. Pods that are ended save, so a checkpoint in between is not needed."""
NAMES_COME_S = 3.0
"""Seconds after the pods' start in which a headless Service does not know them."""
RUNS, DATA = "/home/runs", "/home/data"
IMAGE = "/home/mtrain"
"""Working directory of the image, with a file of its own."""
CACHES = {"deepspeed": {f"{pod}/.config/mlflow/telemetry.json" for pod in range(2)}}
"""Files that a job leaves outside of its run folder: DeepSpeed imports MLflow where it is installed, which writes them."""
OWN_MOUNTS = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]


@dataclass
class Pods:
    """The pods of one job, on one host each."""

    lab: Lab
    name: str
    pods: list[Pod]
    job: Job = field(init=False)
    homes: Path = field(init=False)
    """Takes the HOME of every pod, so that a test sees what was written there."""

    def __post_init__(self) -> None:
        self.job = Job(self.lab, self.name, [], self.lab.share / "runs")
        self.job.runs.mkdir(exist_ok=True)
        self.homes = self.lab.share / f"homes-{self.name}"

    def start(self, jobs: Jobs) -> "Pods":
        """Start every pod; their names become known later."""
        self.job.outputs.clear()
        for pod in self.pods:
            self.job.outputs.append(self._start(jobs, pod))
        threading.Timer(NAMES_COME_S, self.publish).start()
        return self

    def _start(self, jobs: Jobs, pod: Pod) -> Output:
        node, home = f"node{pod.index + 1}", self.homes / str(pod.index)
        home.mkdir(parents=True, exist_ok=True)
        image = self.lab.share / "image"
        image.mkdir(exist_ok=True)
        (image / "classes.txt").write_text("of the image\n")
        linked = {path: text for path, text in pod.files.items() if path.startswith("/etc/mtrain/")}
        settings = {
            "argv": pod.argv,
            "env": pod.env,
            "cwd": IMAGE,
            "files": {path: text for path, text in pod.files.items() if path not in linked},
            "links": linked,
            "binds": {str(self.job.runs): RUNS, str(home): pod.env["HOME"]},
            "read_only": {str(self.lab.share / "data"): DATA, str(image): IMAGE},
        }
        file = self.lab.share / f"pod-{self.name}-{pod.index}.json"
        file.write_text(json.dumps(settings))
        own = [] if os.geteuid() == 0 else ["--map-root-user"]
        here = Path(__file__).with_name("pod.py")
        return jobs._start(node, [*OWN_MOUNTS, *own, sys.executable, str(here), str(file)])

    def publish(self) -> None:
        """Let the pods' names resolve on every host."""
        lines = "".join(f"{address(f'node{pod.index + 1}')} {pod.host}\n" for pod in self.pods)
        for pod in self.pods:
            self.lab.run(f"node{pod.index + 1}", ["sh", "-c", f"cat >> /etc/hosts <<END\n{lines}END"])

    def withdraw(self) -> None:
        """Let nobody know the names."""
        for pod in self.pods:
            self.lab.run(f"node{pod.index + 1}", ["sed", "-i", f"/{self.name}/d", "/etc/hosts"])

    def starters(self) -> list[Process]:
        """The first process of every pod."""
        found = [process for pod in self.pods for process in self.lab.processes(f"node{pod.index + 1}")]
        return [process for process in found if process.module == "mtrain" and self.name in process.words]

    def written(self) -> set[str]:
        """Files that the pods have left in the folders of their own: HOME and /tmp."""
        homes = {str(path.relative_to(self.homes)) for path in self.homes.rglob("*") if path.is_file()}
        homes = {name for name in homes if not any(f"/.cache/mtrain/{kept}/" in name for kept in ("kernels", "verbs"))}
        looks = [self.lab.run(f"node{pod.index + 1}", ["find", "/tmp", "-xdev", "-type", "f"]) for pod in self.pods]
        return homes | {line for look in looks for line in look.splitlines()}

    def terminate(self) -> None:
        """Send SIGTERM to all pods at once, as the deletion of a job does."""
        starters = self.starters()
        assert len(starters) == len(self.pods)
        threads = [threading.Thread(target=self.lab.kill, args=(starter, "TERM")) for starter in starters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def codes(self, *, timeout_s: float = 240) -> list[int]:
        """Exit codes of all pods, once they have ended."""
        return [output.finish(timeout_s=timeout_s).code for output in self.job.outputs]

    def text(self) -> str:
        return "\n".join(f"-- {output.node}\n{output.text}" for output in self.job.outputs)


def _planned(
    lab: Lab, name: str, backend: str, *, kind: str, count: int = 2, script: str = "", more: Sequence[str] = ()
) -> Pods:
    """The pods of the manifests that mtrain prints, on a machine that is none of the hosts; ``more``: further words."""
    options = {
        "image": "mtrain:1",
        "kind": kind,
        "python": sys.executable,
        "runs_claim": "runs",
        "runs_path": RUNS,
        "data_claim": "data",
        "data_path": DATA,
        "secret": "mtrain",
    }
    words = [word for key, value in options.items() for word in ("-o", f"cluster.options.{key}={value}")]
    values = {"data.root": DATA, **{key.replace("__", "."): value for key, value in VALUES.items()}}
    words += [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    words += ["--cluster", "kubernetes", "-N", str(count), "--nproc-per-node", "1", "--name", name, *more]
    verb = ["submit", "--dry-run"] if script else ["plan", "-c", "mtrain.yml"]
    argv = [sys.executable, "-m", "mtrain", *verb, "-b", backend, *words, *([script] if script else [])]
    text = subprocess.run(argv, cwd=lab.share, check=True, capture_output=True, text=True).stdout
    made = pods(list(yaml.safe_load_all(text)), secrets={"MTRAIN_CLUSTER_SECRET": "known to all pods"})
    return Pods(lab, name, made)


@contextmanager
def _played(lab: Lab, name: str, backend: str, **more: Any) -> Iterator[Pods]:
    made = _planned(lab, name, backend, **more)
    try:
        yield made
    finally:
        made.withdraw()


CASES = [
    pytest.param(BACKENDS[0].values[0], "job", marks=BACKENDS[0].marks),
    pytest.param(BACKENDS[0].values[0], "trainjob", marks=[*BACKENDS[0].marks, pytest.mark.slow]),
    *(pytest.param(*each.values, "job", marks=[*each.marks, pytest.mark.slow]) for each in BACKENDS[1:]),
]


@pytest.mark.parametrize(("backend", "kind"), CASES)
def test_pods_that_are_ended_at_once_and_replaced_learn_what_one_host_learns(jobs: Jobs, lab: Lab, backend, kind):
    name = f"pods-{backend}-{kind}"
    with _played(lab, name, backend, kind=kind) as played:
        played.start(jobs).job.reach(1)
        played.terminate()
        assert played.codes() == [143, 143], played.text()
        done = len(played.job.updates())
        assert 2 <= done < UPDATES
        played.withdraw()
        played.start(jobs)
        assert played.codes() == [0, 0], played.text()
        assert sorted(set(played.job.updates())) == list(range(UPDATES))
        actual, written = played.job.summary(), played.written()
    assert written <= CACHES.get(backend, set())
    one = jobs.on_one(f"{name}-one", ranks=2, backend=backend, **VALUES)
    assert one.finish().code == 0, one.leader.text
    assert {key: actual[key] for key in SAME} == {key: one.summary()[key] for key in SAME}


SCRIPT = """
from parts import layers

import mtrain


with mtrain.session() as session:
    print("beside it:", layers.NAME, "in the image:", open("classes.txt").read().strip(), "ranks:", session.size)
"""


def test_pods_run_a_script_that_imports_what_is_beside_it_and_read_files_of_the_image(jobs: Jobs, lab: Lab):
    (lab.share / "parts").mkdir(exist_ok=True)
    (lab.share / "parts" / "layers.py").write_text("NAME = 'layers'\n")
    (lab.share / "mine.py").write_text(SCRIPT)
    with _played(lab, "pods-script", "ddp", kind="job", script="mine.py") as played:
        played.start(jobs)
        assert played.codes() == [0, 0], played.text()
        log = (lab.share / "runs" / "pods-script" / "logs" / "rank-0.log").read_text()
    assert "beside it: layers in the image: of the image ranks: 2" in log
