"""A job leaves only caches of libraries outside its run folder, with every backend and after every kind of end.

Each job has a TMPDIR and a HOME of its own, and, where this user may mount, a /dev/shm of its own too. The quick cases
are those of the other tests of this folder: `runner` looks after each of them.
"""

import shutil
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import psutil
import pytest

from tests.faults.conftest import Runner, ranks_of

pytestmark = pytest.mark.slow
OWN_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'


def kill_native_starter(process: subprocess.Popen) -> None:
    """The library's own starter; under solo there is none, and the rank takes its place."""
    psutil.Process(process.pid).children()[0].kill()


def kill_rank(process: subprocess.Popen) -> None:
    ranks_of(process)[-1].kill()


WAYS: dict[str, tuple[Callable[[subprocess.Popen], object] | None, int]] = {
    "done": (None, 0),
    "failed rank": (kill_rank, 1),
    "SIGTERM": (lambda process: process.send_signal(signal.SIGTERM), 143),
    "Ctrl-C": (lambda process: process.send_signal(signal.SIGINT), 130),
    "kill -9 of the native starter": (kill_native_starter, 1),
    "kill -9 of mtrain": (lambda process: process.kill(), -9),
}


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("backend", "library"),
    [("solo", "torch"), ("ddp", "torch"), ("horovod", "horovod"), ("deepspeed", "deepspeed"), ("fleet", "paddle")],
)
def test_a_job_leaves_nothing_outside_its_run_folder(runner: Runner, wait_until_gone, backend, library, way):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    strike, code = WAYS[way]
    if may_mount():
        runner.prefix = ["unshare", "--mount", "sh", "-c", OWN_SHM, str(runner.outside("shm"))]
    more = [] if strike is None else ["-o", "train.updates=100000", "-o", "checkpoint.every_updates=1000"]
    more += ["-o", "report.tensorboard=true"]
    process = runner.start([*runner.arguments(name="x", backend=backend, ranks=1 if backend == "solo" else 2), *more])
    everybody = []
    if strike is not None:
        runner.wait_for_update("x", 1, process)
        everybody = psutil.Process(process.pid).children(recursive=True)
        strike(process)
    ended, output = runner.finish(process)
    assert ended == code, output
    wait_until_gone(everybody)
    assert runner.left_outside() == []


@pytest.fixture
def wait_until_gone():
    def wait(everybody: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(everybody, timeout=30)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

    return wait
