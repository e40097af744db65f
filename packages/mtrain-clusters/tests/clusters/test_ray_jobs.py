"""Jobs on a real Ray cluster of four nodes, each at a loopback address of its own."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from tests.clusters.ray_cluster import RayCluster

from tests.cluster.jobs import ENDLESS, prepare
from tests.cluster.lab import wait_for

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is not installed")
HOSTS = 3
START_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    made = RayCluster()
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made.up(HOSTS + 1)  # one to spare
        yield made
    finally:
        made.down()
        signal.signal(signal.SIGTERM, former)


@dataclass
class Jobs:
    """Runs jobs in a folder of its own, and knows their processes by it."""

    folder: Path
    cluster: RayCluster
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def words(self, name: str, *more: str, hosts: int = HOSTS) -> list[str]:
        command = [sys.executable, "-m", "mtrain", "train", "-c", "mtrain.yml", "--backend", "ddp", "--name", name]
        where = ["--cluster", "ray", "--nnodes", str(hosts), "--nproc-per-node", "1"] if hosts else []
        return [*command, *where, *more]

    def start(self, name: str, *more: str, hosts: int = HOSTS) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(
                self.words(name, *more, hosts=hosts),
                cwd=self.folder,
                env=self.cluster.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def reach(self, name: str, update: int = 3) -> None:
        def reached() -> bool:
            file = self.folder / "runs" / name / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            return sum('"kind": "update"' in line for line in lines) > update

        wait_for(reached, timeout_s=START_S, what=f"update {update} of {name}")

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def weights(self, name: str, step: int) -> bytes:
        return (self.folder / "runs" / name / "checkpoints" / f"step-{step:08d}" / "weights.safetensors").read_bytes()

    def address(self, name: str, node: int) -> str:
        """The address of a host of a job."""
        plan = json.loads((self.folder / "runs" / name / "plan.json").read_text())
        return str(plan["commands"][node]["host"])

    def processes(self) -> list[psutil.Process]:
        """Every process of mtrain that works in the folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd().startswith(str(self.folder)) and "-m" in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    prepare(made)
    return made


@pytest.fixture
def jobs(cluster: RayCluster, folder: Path) -> Iterator[Jobs]:
    made = Jobs(folder, cluster)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    wait_for(lambda: not made.processes(), timeout_s=30, what="the end of every process of the job")


def _ended(job: "subprocess.Popen[bytes]", code: int, text: Callable[[], str]) -> None:
    assert job.wait(START_S) == code, text()


def test_three_nodes_learn_the_bits_of_three_ranks_on_one_host(jobs):
    _ended(jobs.start("one", "--nproc-per-node", "3", hosts=0), 0, lambda: jobs.text("one"))
    _ended(jobs.start("three"), 0, lambda: jobs.text("three"))
    assert jobs.weights("three", 10) == jobs.weights("one", 10)
    assert "done: 10 updates" in jobs.text("three")
    assert " on 3 ranks" in jobs.text("three")
    addresses = {jobs.address("three", node) for node in range(HOSTS)}
    assert len(addresses) == HOSTS
    assert jobs.address("three", 0) == jobs.cluster.addresses[0]  # where the command was typed


def test_nodes_that_ray_does_not_have_are_waited_for_and_then_named(jobs):
    job = jobs.start("more", "-o", "cluster.join_timeout_s=6", "-o", "train.batch_size=6", hosts=6)
    _ended(job, 2, lambda: jobs.text("more"))
    assert "waiting for Ray, up to" in jobs.text("more")
    assert "the job needs 6 nodes with 1 CPU free on each; Ray has " in jobs.text("more")
    assert not (jobs.folder / "runs" / "more").exists()


def test_sigterm_saves_and_nothing_of_ray_is_in_the_ranks(jobs):
    job = jobs.start("ended", "-o", f"train.updates={ENDLESS}")
    jobs.reach("ended")
    ranks = [process for process in jobs.processes() if "mtrain.rank.worker" in process.cmdline()]
    variables = [process.environ() for process in ranks]
    assert variables
    assert not {name for each in variables for name in each if name.startswith("RAY_") and name != "RAY_ADDRESS"}
    assert {each["OMP_NUM_THREADS"] for each in variables} == {"1"}
    job.terminate()
    _ended(job, 143, lambda: jobs.text("ended"))
    assert "ended, state saved; go on with --resume" in jobs.text("ended")


def test_a_driver_that_is_killed_leaves_nothing(jobs):
    job = jobs.start("killed", "-o", f"train.updates={ENDLESS}")
    jobs.reach("killed")
    job.kill()
    job.wait()
    wait_for(lambda: not jobs.processes(), timeout_s=30, what="the end of agents and ranks")


def test_ray_job_stop_saves(jobs):
    inner = ["env", "-C", str(jobs.folder), *jobs.words("submitted", "-o", f"train.updates={ENDLESS}")]
    runtime = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60", "OMP_NUM_THREADS": "1"}})
    jobs.cluster.job("submit", "--no-wait", "--submission-id", "it", "--runtime-env-json", runtime, "--", *inner)
    jobs.reach("submitted")
    jobs.cluster.job("stop", "it")
    assert "ended, state saved; go on with --resume" in jobs.cluster.job("logs", "it")
    assert sorted((jobs.folder / "runs" / "submitted" / "checkpoints").glob("step-*"))


def test_a_job_goes_on_where_ray_places_a_lost_node_anew_and_learns_the_same(jobs):
    _ended(jobs.start("whole", "-o", "train.updates=20"), 0, lambda: jobs.text("whole"))
    job = jobs.start("broken", "-o", "train.updates=20", "--max-restarts", "1", "-o", "cluster.join_timeout_s=120")
    jobs.reach("broken")
    lost = jobs.address("broken", 2)
    jobs.cluster.kill(lost)
    _ended(job, 0, lambda: jobs.text("broken"))
    assert f"host {lost} " in jobs.text("broken")
    assert "is lost: the connection was closed (its Ray " in jobs.text("broken")
    assert f" in place of {lost}\n" in jobs.text("broken")
    assert jobs.weights("broken", 20) == jobs.weights("whole", 20)
