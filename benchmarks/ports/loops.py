"""Run the scripts of examples/ports with loops of their own: several models, other orders of steps, games."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.ports.jobs import (
    FOLDER,
    ONE_THREAD,
    PYTHON,
    QUIET,
    JobError,
    Weights,
    difference,
    environment,
    fabric,
    run,
    torchrun,
)
from mtrain.core.checkpoint import store
from mtrain.weights import reading

BACKENDS = {
    "solo": ("--backend", "solo"),
    "ddp": ("--backend", "ddp"),
    "horovod": ("--backend", "horovod"),
    "ZeRO 1": ("--backend", "deepspeed", "-o", "backend.options.stage=1"),
    "ZeRO 3": ("--backend", "deepspeed", "-o", "backend.options.stage=3"),
    "fsdp": ("--backend", "fsdp"),
    "fleet": ("--backend", "fleet"),
}
FP64 = ("-o", "train.precision=fp64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One folder of examples/ports."""

    name: str
    title: str
    seed: int = 1
    peers: tuple[str, ...] = ()
    """Libraries with which it is written, too: ``fabric`` and ``accelerate``."""

    @property
    def folder(self) -> Path:
        """The folder of the scripts."""
        return FOLDER / self.name


SCRIPTS = (
    Script(name="dcgan", title="DCGAN", seed=999, peers=("fabric", "accelerate")),
    Script(name="wgan_gp", title="WGAN-GP", seed=7),
    Script(name="cyclegan", title="CycleGAN", seed=3),
    Script(name="distillation", title="Distillation, frozen teacher", seed=5),
    Script(name="mean_teacher", title="Mean teacher", seed=11, peers=("fabric", "accelerate")),
    Script(name="surgery", title="Gradient surgery, plateau, skipped steps", seed=13, peers=("fabric", "accelerate")),
    Script(name="dqn", title="DQN", seed=17),
    Script(name="sac", title="SAC", seed=19),
    Script(name="actor_critic", title="Actor-critic", seed=23),
    Script(name="ppo", title="PPO: rollouts, epochs, minibatches", seed=37),
    Script(name="word_language_model", title="Word language model, hidden state carried", seed=31),
    Script(name="module", title="Module in Lightning's form", seed=29),
)


def by_name(name: str) -> Script:
    """Return the script of a folder."""
    return next(script for script in SCRIPTS if script.name == name)


def plain(script: Script, *flags: str) -> Weights:
    """Run plain.py in one process, and return the weights of all its models under mtrain's names."""
    return _of_files(script, [PYTHON, str(script.folder / "plain.py"), *flags])


def peer(script: Script, library: str, size: int, *flags: str) -> Weights:
    """Run the script's form on another library on ``size`` ranks with the launcher of that library, and return its weights."""
    launch = fabric(size) if library == "fabric" else torchrun(size)
    return _of_files(script, [*launch, str(script.folder / f"peer_{library}.py"), *flags])


def _of_files(script: Script, command: Sequence[str]) -> Weights:
    with tempfile.TemporaryDirectory() as here:
        run(command, Path(here))
        arrays = {}
        for file in sorted(Path(here).glob("*.pt")):
            prefix = "" if file.stem == "weights" else f"{file.stem}/"
            arrays |= {f"{prefix}{name}": array for name, array in reading.read(file).arrays.items()}
        return arrays


def command(script: Script, backend: str, size: int, *words: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line of a job of port.py; ``flags`` are the script's own."""
    ranks = ["--nproc-per-node", str(size)] if backend != "solo" else []
    options = [*QUIET, *ONE_THREAD, "--seed", str(script.seed), *BACKENDS[backend]]
    return [PYTHON, "-m", "mtrain", "run", *options, *ranks, *words, str(script.folder / "port.py"), *flags]


def ours(script: Script, backend: str, size: int, *, fp64: bool = True, flags: Sequence[str] = ()) -> Weights:
    """Run port.py on ``size`` ranks of a backend, and return its weights."""
    with tempfile.TemporaryDirectory() as here:
        words = ["--name", "port", *(FP64 if fp64 else ())]
        run(command(script, backend, size, *words, flags=flags), Path(here))
        return newest(Path(here) / "runs" / "port")


def newest(run_folder: Path) -> Weights:
    """Return the weights of a run's newest checkpoint."""
    checkpoint = store.newest(run_folder / "checkpoints")
    assert checkpoint is not None
    return dict(store.load(checkpoint).state.weights)


def killed(script: Script, backend: str, size: int, *, flags: Sequence[str] = ()) -> tuple[int, Weights]:
    """Kill all processes of a job of port.py with signal 9 in mid-training, and resume it.

    Returns:
        The number of updates in the checkpoint that was resumed, and the weights at the end.
    """
    with tempfile.TemporaryDirectory() as here:
        folder = Path(here) / "runs" / "port"
        words = ["--name", "port", *FP64, "-o", "checkpoint.every_updates=1"]
        job = subprocess.Popen(
            command(script, backend, size, *words, flags=flags),
            cwd=here,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _kill_in_mid_training(job, folder)
        checkpoint = store.newest(folder / "checkpoints")
        assert checkpoint is not None
        updates = store.load(checkpoint).progress.update
        run(command(script, backend, size, "--resume", str(folder), *FP64, flags=flags), Path(here))
        return updates, newest(folder)


def _kill_in_mid_training(job: "subprocess.Popen[bytes]", folder: Path, *, timeout_s: float = 120) -> None:
    """Kill a job and its ranks with signal 9 once it has made a third of its updates and saved some.

    Raises:
        JobError: it ended before.
    """
    records = folder / "metrics.jsonl"
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and job.poll() is None:
        made, total = _updates(records)
        if total and made >= total // 3 and store.newest(folder / "checkpoints") is not None:
            break
        time.sleep(0.005)
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    job.wait()
    psutil.wait_procs(processes[1:], timeout=30)
    made, total = _updates(records)
    if not 0 < made < total:
        raise JobError(
            f"{folder}: {made} of {total} updates were made when the job was killed; expected some and not all"
        )


def _updates(records: Path) -> tuple[int, int]:
    """Return how many updates a job has reported, and how many it will make."""
    made = total = 0
    if records.exists():
        for line in records.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                record = json.loads(line)
                total = record.get("total_updates", total)
                made += record.get("kind") == "update"
    return made, total


def compared(script: Script, backend: str, size: int) -> float:
    """Return the largest difference in float64 of any weight of port.py from that of plain.py."""
    return between(plain(script, "--fp64"), ours(script, backend, size))


def between(reference: Weights, weights: Weights) -> float:
    """Return the largest difference of weights; a frozen model that a plain script does not save is left out."""
    return difference(reference, {name: array for name, array in weights.items() if name in reference})
