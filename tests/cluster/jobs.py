"""Small real jobs on the hosts of a lab, started with one command or with one on each host, watched from outside."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.lab import Lab, Process, wait_for

HOSTS = 3
"""One rank on each."""
FIRST = "node1"
"""Has rank 0, and its files."""
UPDATES = 10
"""Of a whole job; four an epoch."""
ENDLESS = 100_000
"""Updates of a job that only a fault ends."""

PLUGINS = """
[models.exploding]
module = "exploding:Exploding"
[models.slow_yolov5]
module = "slow:SlowYOLOv5"
[models.slow_ppyoloe]
module = "slow:SlowPPYOLOE"
[models.slow_vit]
module = "slow:SlowViT"
"""
SLOW = """
import time

from mtrain.models.ppyoloe.model import PPYOLOEs
from mtrain.models.vit.model import ViT
from mtrain.models.yolov5.model import YOLOv5n


class Slow:
    def build(self, task, collective):
        module = super().build(task, collective)
        module.register_forward_pre_hook(lambda *arguments: time.sleep(0.7))
        return module


class SlowYOLOv5(Slow, YOLOv5n):
    pass


class SlowPPYOLOE(Slow, PPYOLOEs):
    pass


class SlowViT(Slow, ViT):
    pass
"""
"""Models whose updates take long enough for hosts to be lost and to come back meanwhile."""
EXPLODING = """
from mtrain.models.yolov5.model import YOLOv5n


class Exploding(YOLOv5n):
    def build(self, task, collective):
        module, calls = super().build(task, collective), []

        def explode(*arguments):
            calls.append(1)
            if collective.rank == 2 and len(calls) == 4:
                raise RuntimeError("the fourth batch is on fire")

        module.register_forward_pre_hook(explode)
        return module
"""


def prepare(folder: Path) -> None:
    """Write the files that every job needs to a folder that all hosts see."""
    make = [sys.executable, "-m", "mtrain", "data", "make", "digits", str(folder / "data")]
    subprocess.run([*make, "--train", "24", "--val", "6", "--size", "64"], check=True, stdout=subprocess.DEVNULL)
    (folder / "plugins.toml").write_text(PLUGINS)
    (folder / "exploding.py").write_text(EXPLODING)
    (folder / "slow.py").write_text(SLOW)
    (folder / "vit.yml").write_text(json.dumps(vit_spec()))
    (folder / "mtrain.yml").write_text(json.dumps(spec(folder)))


def spec(folder: Path) -> dict[str, Any]:
    """A tiny detector on digits of 64 px; YAML reads JSON."""
    return {
        "_BASE_": "digits",
        "model": {"options": {"autoanchor": False}},
        "data": {"root": str(folder / "data"), "format": "coco", "image_size": 64, "workers": 1},
        "train": {"epochs": None, "updates": UPDATES, "batch_size": 6},
        "evaluate": {"every_epochs": None},
        "checkpoint": {"every_updates": 1},
        # On one host with three ranks, and on three with one each, sums must be made of the same parts.
        "cluster": {"threads": 1},
        "report": {"dir": "runs", "plots": False, "tensorboard": False},
    }


def vit_spec() -> dict[str, Any]:
    """A small vision transformer on digits of 8 px."""
    return {
        "_BASE_": "vit_digits",
        "train": {"epochs": None, "updates": UPDATES, "batch_size": 48},
        "data": {"workers": 1},
        "evaluate": {"every_epochs": None},
        "checkpoint": {"every_updates": 1},
        "cluster": {"threads": 1},
        "report": {"dir": "runs", "plots": False, "tensorboard": False},
    }


@dataclass
class Output:
    """A command on a host."""

    node: str
    process: "subprocess.Popen[str]"
    file: Path
    """Takes what it prints."""

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self.file.read_text()

    @property
    def last(self) -> list[str]:
        """Lines from the end, without empty ones."""
        return [line for line in reversed(self.text.splitlines()) if line.strip()]

    @property
    def code(self) -> int:
        """Exit code of one that has ended."""
        assert self.process.returncode is not None
        return self.process.returncode

    def finish(self, *, timeout_s: float) -> "Output":
        """Wait for the end.

        Raises:
            AssertionError: it does not come.
        """
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node}: still there after {timeout_s:g} s:\n{self.text}") from None
        return self


@dataclass
class Job:
    """One job; ``outputs`` are those of its commands, the leader's first."""

    lab: Lab
    name: str
    outputs: list[Output]
    runs: Path

    @property
    def leader(self) -> Output:
        """The command whose words count."""
        return self.outputs[0]

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return self.runs / self.name

    def finish(self, *, timeout_s: float = 240) -> Output:
        """Wait for all commands; the leader's output."""
        for output in self.outputs:
            output.finish(timeout_s=timeout_s)
        return self.leader

    def read(self, name: str) -> str:
        """A file of the run folder; empty while there is none."""
        if self.folder.is_relative_to(self.lab.share):
            path = self.folder / name
            return path.read_text() if path.exists() else ""
        process = self.lab.start(FIRST, ["cat", str(self.folder / name)])
        output, _ = process.communicate(timeout=60)
        return output if process.returncode == 0 else ""

    def updates(self) -> list[int]:
        """Numbers of the updates that were made, from 0, one entry for each time."""
        rows = (json.loads(line) for line in self.read("metrics.jsonl").splitlines() if line.endswith("}"))
        return [row["update"] for row in rows if row["kind"] == "update"]

    def reach(self, update: int, *, timeout_s: float = 180) -> "Job":
        """Wait for an update.

        Raises:
            AssertionError: the job ends before.
        """

        def reached() -> bool:
            if self.leader.process.poll() is not None:
                raise AssertionError(self.leader.text)
            return update in self.updates()

        wait_for(reached, timeout_s=timeout_s, what=f"update {update}")
        return self

    def summary(self) -> dict[str, Any]:
        """Return the summary of a job that has ended well."""
        actual: dict[str, Any] = json.loads(self.read("summary.json"))
        return actual

    def starter(self, node: str) -> Process:
        """The process of ``mtrain train`` on a host, for signals."""
        (actual,) = [p for p in self.lab.processes(node) if p.module == "mtrain" and self.name in p.words]
        return actual


@dataclass
class Jobs:
    """Starts jobs, each with a name of its own that begins as asked; ends what is left of their commands."""

    lab: Lab
    started: list[Output] = field(default_factory=list)

    def over_ssh(self, name: str, *, at: str = FIRST, **more: Any) -> Job:
        """One command, on ``at``, which need not be one of the hosts."""
        return self._job(name, {at: ["--cluster", "ssh"]}, **more)

    def by_hand(
        self,
        name: str,
        *,
        nodes: Sequence[str] = ("node1", "node2", "node3"),
        each: Mapping[str, Sequence[str]] | None = None,
        **more: Any,
    ) -> Job:
        """The same command on every host; ``each``: what some add."""
        return self._job(name, {node: (each or {}).get(node, ()) for node in nodes}, **more)

    def on_one(self, name: str, *, ranks: int = HOSTS, **more: Any) -> Job:
        """As many ranks on one host: what the others are compared with."""
        return self._job(name, {FIRST: ()}, ips="", ranks=ranks, **more)

    def _job(
        self,
        name: str,
        typed: Mapping[str, Sequence[str]],
        *,
        runs: Path | None = None,
        resumed: Job | None = None,
        **more: Any,
    ) -> Job:
        """``typed``: what each command has of its own, by its host."""
        name = f"{name}-{time.monotonic_ns()}" if resumed is None else resumed.name
        job = Job(self.lab, name, [], runs or self.lab.share / "runs")
        again = [] if resumed is None else ["--resume", str(resumed.folder)]
        argv = [*self.argv(name, runs=runs, **more), *again]
        for node, words in typed.items():
            job.outputs.append(self._start(node, [*argv, *words]))
        return job

    def argv(
        self,
        name: str,
        *,
        backend: str = "ddp",
        ips: str | None = None,
        ranks: int | None = 1,
        runs: Path | None = None,
        more: Sequence[str] = (),
        **values: Any,
    ) -> list[str]:
        """``values``: keys of the spec, ``__`` for the dot."""
        hosts = self.lab.ips(HOSTS) if ips is None else ips
        values = {key.replace("__", "."): value for key, value in values.items()}
        values |= {"report.dir": runs} if runs else {}
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        placed = ["--ips", hosts] if hosts else []
        placed += ["--nproc-per-node", str(ranks)] if ranks else []
        return [sys.executable, "-m", "mtrain", "train", "--backend", backend, "--name", name, *placed, *pairs, *more]

    def start_again(self, job: Job, node: str, **more: Any) -> Output:
        """Type the command of a job that is started by hand on one more host."""
        return self._start(node, self.argv(job.name, **more))

    def _start(self, node: str, argv: Sequence[str]) -> Output:
        file = self.lab.share / f"output-{time.monotonic_ns()}.txt"
        with file.open("w") as opened:
            process = self.lab.start(node, argv, output=opened)
        self.started.append(Output(node, process, file))
        return self.started[-1]

    def end(self) -> None:
        """Let go of commands that still run; what they do on their hosts is ended by ``Lab.mend``."""
        for output in self.started:
            if output.process.poll() is None:
                output.process.kill()
            output.process.wait()
