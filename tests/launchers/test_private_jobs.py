"""A running job hides its secrets: no file contains a secret of its environment, and no port is open to other
machines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.system.job_secret import VARIABLE as JOB_SECRET
from tests.starts import starts_processes

PLANTED = {
    "HF_TOKEN": "walrus-1",
    "MY_DATABASE": "walrus-2",
    "ORDERS": "mysql://me:walrus-3@db.example.org/orders",
    "FLAGS_print_launcher_env": "true",
    "CUDA_API_KEY": "walrus-4",
    "http_proxy": "http://me:walrus-5@proxy.example.org",
}
"""Of the caller; Paddle prints environments where it is asked to by the fourth."""
LOOPBACK = ("127.0.0.1", "::1")


def _case(*words: str, library: str = "torch", slow: bool = False) -> Any:
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return pytest.param(list(words), marks=[missing, *([pytest.mark.slow] if slow else [])], id=" ".join(words[1:]))


JOBS = [
    _case("--backend", "ddp"),
    _case("--backend", "horovod", library="horovod"),
    _case("--backend", "fleet", library="paddle"),
    _case("--backend", "deepspeed", library="deepspeed", slow=True),
    _case("--backend", "ddp", "--launcher", "deepspeed", library="deepspeed", slow=True),
    _case("--backend", "ddp", "--ips", "::1", slow=True),
]
"""One rank alone is looked at in tests/system/test_security.py."""


class Job:
    """A job of two ranks that trains until it is asked to end."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.run = folder / "runs" / "digits"
        values = ["train.updates=100000", "train.epochs=null", "train.batch_size=4", "data.image_size=64"]
        values += ["data.workers=0", "data.options.train=8", "data.options.val=4", "evaluate.every_epochs=null"]
        values += [f"data.root={folder / 'digits'}", f"report.dir={folder / 'runs'}", "cluster.threads=1"]
        values += ["report.plots=false", "report.tensorboard=false"]
        ranks = ["--nproc-per-node", "2"]
        pairs = [word for value in values for word in ("-o", value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mtrain", "train", "-c", "digits", "--devices", "cpu", *words, *ranks, *pairs],
            env={**os.environ, **PLANTED},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self) -> None:
        """Wait until updates are made."""
        deadline = time.monotonic() + 400
        metrics = self.run / "metrics.jsonl"
        while not metrics.exists() or '"update"' not in metrics.read_text():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the job does not train"
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Those of the job, its starter included."""
        starter = psutil.Process(self.process.pid)
        return [starter, *starter.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """Those that train."""
        return [process for process in self.processes() if _module(process) == "mtrain.rank.worker"]

    def listening(self) -> set[tuple[str, str]]:
        """(address, program) of every port at which a process of the job waits for connections."""
        results = set()
        for process in self.processes():
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    results.add((connection.laddr.ip, _module(process)))
        return results

    def end(self) -> str:
        """Ask it to end; what it printed."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=120)[0]


def _module(process: psutil.Process) -> str:
    """Return the module that ``python -m`` runs."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


@pytest.fixture(params=JOBS)
@starts_processes
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, request.param)
    try:
        made.train()
        yield made
    finally:
        if made.process.poll() is None:
            made.end()


def test_no_file_and_no_command_line_holds_a_secret_and_no_port_is_open_to_other_machines(job: Job):
    listening = job.listening()
    environ = job.ranks()[0].environ()
    assert {name: environ.get(name) for name in PLANTED} == PLANTED, "ranks have the whole environment"
    secrets = [environ[JOB_SECRET], *(f"walrus-{number}" for number in range(1, 6))]
    typed = {
        (_module(process), word) for process in job.processes() for word in secrets if word in str(process.cmdline())
    }
    shown = job.end()
    assert job.process.returncode == 143, shown
    files = [path for path in job.run.rglob("*") if path.is_file()]
    actual = {(path.name, word) for path in files for word in secrets if word.encode() in path.read_bytes()}
    assert actual == set()
    assert typed == set(), "every user of the machine can read command lines"
    assert {(address, module) for address, module in listening if address not in LOOPBACK} == set()
