"""Jobs through Horovod's own starter: its commands, and real ranks that train, fail, are killed and are asked to end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from mtrain.core.interfaces import Host
from mtrain.errors import SpecError
from mtrain.launchers.horovodrun import Horovodrun
from tests.starts import starts_processes

WORKER = ("-m", "mtrain.rank.worker", "--run-dir", "/runs/a b")
needs_horovod = pytest.mark.horovod


# ------------------------------------------------------------------------------------------------------- its commands
def launcher(**options: object) -> Horovodrun:
    return Horovodrun(Horovodrun.Options(python="/opt/python", **options))


def test_one_host_needs_no_ssh_and_no_interface():
    (command,) = launcher(interface="eth0", threads=3).plan(WORKER, [Host(address="127.0.0.1", slots=2)], 2)
    assert command.host == "127.0.0.1"
    assert list(command.argv) == [
        *("/opt/python", "-m", "mtrain.launchers.withheld", "keep"),
        *("/opt/python", "-m", "mtrain.backends._horovod.single_host_starter", "--gloo", "--disable-cache"),
        *("-np", "2", "-H", "127.0.0.1:2"),
        *("sh", "-c", '"$@"; exit $?', "sh"),
        *("/opt/python", "-m", "mtrain.launchers.withheld", "restore"),
        *("/opt/python", *WORKER),
    ]
    assert command.env["OMP_NUM_THREADS"] == "3"


def test_each_of_several_hosts_starts_its_own_ranks_and_they_differ_in_their_place_alone():
    hosts = [Host(address="10.0.0.1", slots=2), Host(address="10.0.0.2", slots=4)]
    options = {"interface": "eth0", "devices": (0, 3), "master_addr": "10.0.0.1", "master_port": 31000}
    first, second = launcher(**options).plan(WORKER, hosts, 2)
    assert list(first.argv) == [
        *(
            "/opt/python",
            "-m",
            "mtrain.backends._horovod.multi_host_starter",
            "--node-rank=0",
            "--hosts=10.0.0.1:2,10.0.0.2:4",
        ),
        *("--rendezvous=10.0.0.1:31000", "--", "/opt/python", *WORKER),
    ]
    assert (first.host, second.host) == ("10.0.0.1", "10.0.0.2")
    assert [pair for pair in zip(first.argv, second.argv, strict=True) if len(set(pair)) > 1] == [
        ("--node-rank=0", "--node-rank=1")
    ]
    assert second.env == first.env
    assert first.env["CUDA_VISIBLE_DEVICES"] == "0,3"


@pytest.mark.parametrize(
    ("addresses", "message"),
    [(("fe80::1", "fe80::2"), "'fe80::1' given, .* IPv4"), (("10.0.0.1", "10.0.0.1"), "give each host once")],
)
def test_hosts_that_horovod_would_mistake_are_refused(addresses, message):
    with pytest.raises(SpecError, match=f"cluster.ips: .*{message}"):
        launcher().plan(WORKER, [Host(address=address, slots=1) for address in addresses], 1)


def test_deaths_are_read_from_what_horovodrun_prints():
    log = (
        "Process 1 exit with status code 137.\n"
        "Terminating remaining workers after failure of Process 1.\n"
        "[0]<stderr>:Process 7 exit with status code 1.\n"
        "Process 0 exit with status code 143.\n"
        "Process 10 exit with status code 3.\n"
        "Process 11 exit with status code 255.\n"
    )
    assert launcher().deaths(log, 1) == [(0, -signal.SIGTERM), (1, -signal.SIGKILL), (10, 3), (11, 255)]
    assert launcher().deaths("", 1) == []


# --------------------------------------------------------------------------------------------------------- real jobs
UPDATES = 10
PLUGINS = """
[backends.hvd]
module = "mtrain.backends.horovod:Horovod"

[launchers.hvdrun]
module = "mtrain.launchers.horovodrun:Horovodrun"

[datasets.unreadable]
module = "failing:Unreadable"

[models.exploding]
module = "failing:Exploding"
"""
FAILING = """
import os
from mtrain.tasks.detection.readers.coco import Coco
from mtrain.models.yolov5.model import YOLOv5n

class Unreadable(Coco):
    def read(self, *arguments, **keywords):
        if os.environ.get("HOROVOD_RANK") == "1":
            raise RuntimeError("the seventh image is upside down")
        return super().read(*arguments, **keywords)

class Exploding(YOLOv5n):
    def build(self, task, collective):
        module, calls = super().build(task, collective), []

        def explode(*arguments):
            calls.append(1)
            if collective.rank == 1 and len(calls) == 4:
                raise RuntimeError("the fourth batch is on fire")

        module.register_forward_pre_hook(explode)
        return module
"""


@dataclass
class Jobs:
    """Starts ``mtrain train`` in a folder of its own and ends what it started."""

    folder: Path
    data: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, name: str, *, backend: str = "hvd", more: Sequence[str] = (), **values: object
    ) -> "subprocess.Popen[str]":
        values = {
            "data.root": self.data,
            "data.format": "coco",
            "data.image_size": 64,
            "data.workers": 1,
            "train.epochs": "null",
            "train.updates": UPDATES,
            "train.batch_size": 4,
            "checkpoint.every_updates": 1,
            "evaluate.every_epochs": "null",
            "report.dir": self.folder / "runs",
            "report.plots": "false",
            "report.tensorboard": "false",
            **{key.replace("__", "."): value for key, value in values.items()},
        }
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        argv = [sys.executable, "-m", "mtrain", "train", "-c", "digits", "--backend", backend, "--nproc-per-node", "2"]
        process = subprocess.Popen(
            [*argv, "--name", name, *pairs, *more],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        self.started.append(process)
        return process

    def run(self, name: str, **more: object) -> tuple[int, str]:
        process = self.start(name, **more)  # type: ignore[arg-type]
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def summary(self, name: str) -> dict[str, object]:
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())

    def updates(self, name: str) -> list[int]:
        file = self.folder / "runs" / name / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row["update"] for row in rows if row["kind"] == "update"]

    def wait_for_update(self, name: str, update: int, process: "subprocess.Popen[str]") -> None:
        self.wait(lambda: update in self.updates(name), process)

    @staticmethod
    def wait(condition: Callable[[], bool], process: "subprocess.Popen[str]", *, timeout_s: float = 180) -> None:
        limit = time.monotonic() + timeout_s
        while not condition():
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < limit, "waited too long"
            time.sleep(0.02)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def rank(process: "subprocess.Popen[str]", number: int) -> psutil.Process:
    """The process of one rank: the outermost interpreter that runs the worker and was told its number."""
    for found in family(process):
        words = found.cmdline()
        is_worker = words[1:3] == ["-m", "mtrain.rank.worker"]
        if is_worker and found.environ().get("HOROVOD_RANK") == str(number):
            return found
    raise AssertionError(f"rank {number} is not there")


def survivors(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Which of them still run after a moment."""
    _, alive = psutil.wait_procs(list(processes), timeout=120)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
@starts_processes
def canvases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "data"
    command = [sys.executable, "-m", "mtrain", "data", "make", "digits", str(folder)]
    subprocess.run([*command, "--train", "20", "--val", "4", "--size", "64"], check=True, env=environment())
    return folder


def jobs_in(folder: Path, data: Path) -> Jobs:
    (folder / "plugins.toml").write_text(PLUGINS)
    (folder / "failing.py").write_text(FAILING)
    return Jobs(folder, data)


@pytest.fixture
def jobs(tmp_path: Path, canvases: Path) -> Iterator[Jobs]:
    made = jobs_in(tmp_path, canvases)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, canvases: Path) -> dict[str, object]:
    made = jobs_in(tmp_path_factory.mktemp("undisturbed"), canvases)
    code, output = made.run("whole")
    assert code == 0, output
    return made.summary("whole")


@needs_horovod
def test_a_job_ends_with_the_weights_of_the_ddp_job_bit_for_bit(jobs: Jobs, undisturbed):
    code, output = jobs.run("ddp", backend="ddp")
    assert code == 0, output
    for key in ("weights_sha256", "ema_sha256", "last"):
        assert jobs.summary("ddp")[key] == undisturbed[key]


@needs_horovod
@pytest.mark.slow
def test_fifty_updates_with_accumulation_clipping_and_average_are_those_of_ddp_bit_for_bit(jobs: Jobs):
    results = {}
    for backend in ("hvd", "ddp"):
        values = {"train__updates": 50, "train__batch_size": 8, "train__accumulate": 2, "train__clip_norm": 10}
        code, output = jobs.run(backend, backend=backend, checkpoint__every_updates=50, **values)
        assert code == 0, output
        results[backend] = jobs.summary(backend)
        print(
            f"yolov5n, 50 updates, {backend}: {results[backend]['weights_sha256']} ema {results[backend]['ema_sha256']}"
        )
    for key in ("weights_sha256", "ema_sha256", "last"):
        assert results["hvd"][key] == results["ddp"][key]


@needs_horovod
def test_a_killed_rank_ends_the_job_and_a_resumed_one_ends_with_the_same_bits(jobs: Jobs, undisturbed):
    process = jobs.start("killed")
    jobs.wait_for_update("killed", 3, process)
    everybody = family(process)
    rank(process, 1).kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "error: rank 1 was ended by signal 9 (SIGKILL)" in output
    assert survivors(everybody) == []
    code, output = jobs.run("killed", more=["--resume", str(jobs.folder / "runs" / "killed")])
    assert code == 0, output
    assert jobs.summary("killed")["updates"] == UPDATES
    for key in ("weights_sha256", "ema_sha256"):
        assert jobs.summary("killed")[key] == undisturbed[key]


@needs_horovod
@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_that_is_asked_to_end_saves_and_goes_on_later_to_the_same_bits(jobs, undisturbed, number, expected):
    process = jobs.start("asked")
    jobs.wait_for_update("asked", 2, process)
    everybody = family(process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == expected, output
    assert "state saved; go on with --resume" in output
    assert survivors(everybody) == []
    code, output = jobs.run("asked", more=["--resume", str(jobs.folder / "runs" / "asked")])
    assert code == 0, output
    assert jobs.summary("asked")["weights_sha256"] == undisturbed["weights_sha256"]


@needs_horovod
@pytest.mark.parametrize(
    ("values", "last_words"),
    [
        ({"data__format": "unreadable"}, "RuntimeError: the seventh image is upside down"),
        ({"model__name": "exploding"}, "RuntimeError: the fourth batch is on fire"),
    ],
    ids=["before the ranks meet", "in training"],
)
def test_the_traceback_of_the_rank_that_failed_first_is_told_last(jobs: Jobs, values, last_words):
    process = jobs.start("failing", **values)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "rank 1 on " in output
    assert output.rstrip().endswith(last_words)
    assert (jobs.folder / "runs" / "failing" / "failures" / "rank-1.json").exists()


@needs_horovod
@pytest.mark.slow
def test_a_starter_that_is_killed_takes_everything_along(jobs: Jobs):
    process = jobs.start("orphaned")
    jobs.wait_for_update("orphaned", 2, process)
    everybody = family(process)
    process.kill()
    process.communicate(timeout=240)
    psutil.wait_procs(everybody, timeout=120)
    assert survivors(everybody) == []
