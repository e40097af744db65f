"""A small real job for fault tests: digits at 64 px, real ranks through the real command line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.starts import starts_processes

CACHES = (
    "home/.cache/matplotlib",
    "home/.config/matplotlib",
    "home/.cache/paddle",
    "home/.cache/mtrain/kernels",
    "home/.cache/mtrain/verbs",
    "tmp/torchinductor_",
)
"""What libraries keep for their next start: matplotlib's list of fonts, an empty folder of Paddle's, torch's compiled
kernels."""
UPDATES = 10
"""Of the whole job; five an epoch."""


@dataclass
class Runner:
    """Starts ``mtrain`` in a folder of its own and ends what it started."""

    folder: Path
    data: Path
    started: list[subprocess.Popen] = field(default_factory=list)
    prefix: list[str] = field(default_factory=list)
    """Of every command: what runs it in surroundings of its own."""

    def arguments(self, *, backend: str = "ddp", ranks: int = 2, name: str) -> list[str]:
        values = {
            "data.root": self.data,
            "data.format": "coco",
            "data.image_size": 64,
            "data.workers": 1,
            "train.epochs": "null",
            "train.updates": UPDATES,
            "train.batch_size": 4,
            "checkpoint.every_updates": 1,
            "checkpoint.keep_last": 3,
            "evaluate.every_epochs": "null",
            "report.dir": self.folder / "runs",
            "report.plots": "false",
            "report.tensorboard": "false",
        }
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        return ["-c", "digits", "--backend", backend, "--nproc-per-node", str(ranks), "--name", name, *pairs]

    def start(self, arguments: Sequence[str], **more: Any) -> subprocess.Popen:
        """``more``: as ``subprocess.Popen`` takes it."""
        command = [*self.prefix, sys.executable, "-m", "mtrain", "train", *arguments]
        environ = {**environment(), "TMPDIR": str(self.outside("tmp")), "HOME": str(self.outside("home"))}
        process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, **more
        )
        self.started.append(process)
        return process

    def outside(self, name: str) -> Path:
        """A folder that a job may write to though it is not its own: ``tmp``, ``home`` or ``shm``."""
        folder = self.folder / "outside" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def left_outside(self) -> list[str]:
        """Return the files that jobs have left outside, without ``CACHES`` and the folders that hold them."""
        base = self.folder / "outside"
        actual = sorted(str(path.relative_to(base)) for path in base.glob("*/**/*"))
        saved = [path for path in actual if not path.startswith(CACHES)]
        return [path for path in saved if not any(cache.startswith(f"{path}/") for cache in CACHES)]

    def finish(self, process: subprocess.Popen, *, timeout_s: float = 240) -> tuple[int, str]:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        return self.finish(self.start(arguments))

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def summary(self, name: str) -> dict:
        return json.loads((self.run_folder(name) / "summary.json").read_text())

    def updates(self, name: str) -> list[dict]:
        path = self.run_folder(name) / "metrics.jsonl"
        if not path.exists():
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [row for row in rows if row["kind"] == "update"]

    def wait_for_update(self, name: str, update: int, process: subprocess.Popen, *, timeout_s: float = 180) -> None:
        limit = time.monotonic() + timeout_s
        while not any(row["update"] >= update for row in self.updates(name)):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < limit, f"update {update} did not come"
            time.sleep(0.02)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Ranks below a starter, their loader processes left out."""
    actual = psutil.Process(process.pid).children(recursive=True)
    workers = [p for p in actual if is_worker(p.cmdline())]
    pids = {p.pid for p in workers}
    return [p for p in workers if p.ppid() not in pids]


def is_worker(words: Sequence[str]) -> bool:
    """Return whether a command line is a rank's, and not that of an agent which names a rank's."""
    return "-m" in words and words[words.index("-m") + 1] == "mtrain.rank.worker"


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def survivors(processes: Sequence[psutil.Process], *, within_s: float = 10) -> list[psutil.Process]:
    """Which of them still run after a moment."""
    gone, alive = psutil.wait_procs(list(processes), timeout=within_s)
    del gone
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
@starts_processes
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "data"
    command = [sys.executable, "-m", "mtrain", "data", "make", "digits", str(folder)]
    subprocess.run([*command, "--train", "20", "--val", "4", "--size", "64"], check=True, env=environment())
    return folder


@pytest.fixture
def runner(tmp_path: Path, digits: Path) -> Iterator[Runner]:
    made = Runner(tmp_path, digits)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert made.left_outside() == [], "jobs left something outside their run folders"
