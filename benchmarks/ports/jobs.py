"""Run the scripts of examples/ports as a user would, and read the weights that they have trained."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Array
from mtrain.core.state.digest import digest
from mtrain.errors import UsageError
from mtrain.system import vectors
from mtrain.system.placement import check_port
from mtrain.weights import reading

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ports"
Weights = Mapping[str, Array]
PYTHON = sys.executable
PATIENT = Path(__file__).with_name("patient.py")
"""Runs a script, and gives its threads time to end."""
QUIET = ("-o", "report.plots=false", "-o", "report.tensorboard=false", "-o", "report.display=plain")
ONE_THREAD = ("-o", "cluster.threads=1")
"""The number of threads changes the last bit of sums; the plain script has one thread, too."""
TORCH_BACKENDS = {
    "solo": ("--backend", "solo"),
    "ddp": ("--backend", "ddp"),
    "horovod": ("--backend", "horovod"),
    "ZeRO 0": ("--backend", "deepspeed", "-o", "backend.options.stage=0"),
    "ZeRO 1": ("--backend", "deepspeed", "-o", "backend.options.stage=1"),
    "ZeRO 3": ("--backend", "deepspeed", "-o", "backend.options.stage=3"),
}
PADDLE_BACKENDS = {
    "solo": ("--backend", "solo", "-o", "backend.options.framework=paddle"),
    "fleet": ("--backend", "fleet"),
}


class JobError(Exception):
    """A script has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One folder of examples/ports."""

    name: str
    title: str
    peer: str
    """Name of the library that the original uses."""
    launch: Callable[[int], Sequence[str]]
    """Returns the command that starts peer.py, without the script, on a number of ranks."""
    peer_ranks: tuple[int, ...] = (1, 2, 3)
    """Numbers of ranks on which the peer runs."""
    backend: str
    """The backend of port A."""
    seed: int = 42
    backends: Mapping[str, tuple[str, ...]]
    weights_file: str = "weights.pt"

    @property
    def folder(self) -> Path:
        """The folder of the scripts."""
        return FOLDER / self.name


def _free_port() -> int:
    """Return the first of eight ports that are free on loopback, below those that Linux gives to connections."""
    while True:
        first = 20000 + 8 * secrets.randbelow(1250)
        try:
            for port in range(first, first + 8):
                check_port("127.0.0.1", port)
        except UsageError:
            continue
        return first


def torchrun(size: int) -> list[str]:
    """Return the command that starts a script on a number of ranks, without the script."""
    return [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), str(PATIENT)]


def fabric(size: int) -> list[str]:
    """Return the command that starts a script of Fabric on a number of ranks, without the script."""
    strategy = ["--strategy", "ddp"] if size > 1 else []
    port = ["--main-address", "127.0.0.1", "--main-port", str(_free_port())]
    return [PYTHON, "-m", "lightning_fabric.cli", "--accelerator", "cpu", "--devices", str(size), *strategy, *port]


def _horovodrun(size: int) -> list[str]:
    return [PYTHON, "-m", "horovod.runner.launch", "-np", str(size), "--gloo", PYTHON]


def _paddle(size: int) -> list[str]:
    launch = [PYTHON, "-m", "paddle.distributed.launch", "--nproc_per_node", str(size), "--log_dir", "log"]
    return [*launch, "--start_port", str(_free_port())]


PORTS = (
    Port(name="ddp_tutorial", title="torch's DDP tutorial", peer="torch DDP", launch=torchrun, backend="ddp",
         backends=TORCH_BACKENDS),
    Port(name="accelerate_vision", title="Accelerate, vision", peer="Accelerate", launch=torchrun, backend="ddp",
         backends=TORCH_BACKENDS),
    Port(name="accelerate_text", title="Accelerate, text", peer="Accelerate", launch=torchrun, backend="ddp",
         backends=TORCH_BACKENDS),
    Port(name="fabric_mnist", title="Lightning Fabric", peer="Fabric", launch=fabric, backend="ddp", seed=1,
         backends=TORCH_BACKENDS),
    Port(name="horovod_mnist", title="Horovod", peer="Horovod", launch=_horovodrun, backend="horovod",
         backends=TORCH_BACKENDS),
    Port(name="paddle_fleet", title="PaddlePaddle fleet", peer="fleet", launch=_paddle, backend="fleet",
         peer_ranks=(2, 3), backends=PADDLE_BACKENDS, weights_file="weights.pdparams"),
)  # fmt: skip


def by_name(name: str) -> Port:
    """Return the port of a folder."""
    return next(port for port in PORTS if port.name == name)


def plain(port: Port, *flags: str) -> Weights:
    """Run plain.py in one process, and return its weights."""
    return _script(port, [PYTHON, str(port.folder / "plain.py"), *flags])


def peer(port: Port, size: int, *flags: str) -> Weights:
    """Run peer.py on ``size`` ranks with the peer's own launcher, and return its weights."""
    return _script(port, [*port.launch(size), str(port.folder / "peer.py"), *flags])


def ours(port: Port, backend: str, size: int, *, own_order: bool = False, fp64: bool = True) -> Weights:
    """Run port.py on ``size`` ranks of a backend, and return its weights."""
    precision = ("-o", "train.precision=fp64") if fp64 else ()
    options = [*QUIET, *ONE_THREAD, *precision, "--seed", str(port.seed), *port.backends[backend]]
    ranks = ["--nproc-per-node", str(size)] if backend != "solo" else []
    script = [str(port.folder / "port.py"), *(["--own-order"] if own_order else [])]
    with tempfile.TemporaryDirectory() as here:
        run([PYTHON, "-m", "mtrain", "run", "--name", "port", *options, *ranks, *script], Path(here))
        newest = store.newest(Path(here) / "runs" / "port" / "checkpoints")
        assert newest is not None
        return dict(store.load(newest).state.weights)


def _script(port: Port, command: Sequence[str]) -> Weights:
    with tempfile.TemporaryDirectory() as here:
        run(command, Path(here))
        return reading.read(Path(here) / port.weights_file).arrays


def environment() -> dict[str, str]:
    """Return the environment of a script: one thread, and no variable of a former job."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "HOROVOD_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    vectors.allow(environ)  # mtrain sets it for itself; with other vector instructions, Paddle's last bits differ
    return environ


def run(command: Sequence[str], here: Path) -> None:
    """Run a command in the folder ``here``.

    Raises:
        JobError: it fails; the message holds the end of what it has printed.
    """
    environ = environment()
    try:
        done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{' '.join(command)}: no end after 300 s") from error
    if done.returncode:
        raise JobError(f"{' '.join(command)}: exit code {done.returncode}\n{_last_words(here, done)}")


def _last_words(here: Path, done: "subprocess.CompletedProcess[str]") -> str:
    logs = [path.read_text(errors="replace")[-1500:] for path in sorted(here.glob("log/workerlog.*"))]
    return "\n".join([(done.stdout + done.stderr)[-1500:], *logs])


def same_bits(one: Weights, other: Weights) -> bool:
    """Return whether two sets of weights have the same digest."""
    return digest(one) == digest(other)


def difference(one: Weights, other: Weights) -> float:
    """Return the largest difference between arrays of the same names and types."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    assert {name: array.dtype for name, array in one.items()} == {name: array.dtype for name, array in other.items()}
    pairs = [(array.astype(np.float64), other[name].astype(np.float64)) for name, array in one.items()]
    return max(float(np.abs(left - right).max()) for left, right in pairs)
