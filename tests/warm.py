"""`mtrain` commands of tests as copies of a warm process, which has imported torch and mtrain: a tenth of a start's cost.

The command runs as it does for a trial of a sweep (`mtrain.system.warm`): it is a process of its own, with the folder,
variables, output and command line of one, and its starters and ranks are copies again. Tests of starting itself start cold:
what is imported, and when; what a library reads from the environment; processes that are no copies.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.system import environment
from mtrain.system.warm import Ahead
from mtrain_sweep.sharing import PARTS, CopiedJob, Copies
from tests import starts

RANKS = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    **dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONUNBUFFERED"), "1"),
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What a plan for this host with one thread for each rank adds to the environment: a rank with other variables starts cold."""
ONE_THREAD = {"MTRAIN_CLUSTER__THREADS": "1"}
"""What the commands have in addition; without it a rank that is alone has a thread for each core, and starts cold."""
READ_AT_IMPORT = re.compile(
    r"PYTHON|LD_|LANG|LC_|TZ$|OMP_|MKL_|OPENBLAS|KMP_|GOMP|GLIBC|MALLOC|TORCH|PYTORCH|CUDA|HIP|NCCL|GLOO|HF_|TRANSFORMERS|DS_|MPL"
    r"|HOME$|PATH$|TMPDIR$|XDG_|MTRAIN_(TRACE|HOME|DEBUG)"
)
"""Names of variables that are read by then."""
OF_A_TEST = ("PYTEST_CURRENT_TEST",)
SETTING = "MTRAIN_TEST_COPY"
"""Variable in which a copy finds its folder and where its output goes; it takes it away before the command runs."""
POLL_S = 0.01


PROGRAMS = ("tests.warm_copy", "mtrain.__main__", "mtrain.backends._torch.ranks.starter")
"""What a copy may run. The first one has the second begin in the folder of its test, and runs other programs."""


_CLOSING: list[Callable[[], None]] = []


def close() -> None:
    """End the warm processes of this worker, and remove what their copies have printed."""
    while _CLOSING:
        _CLOSING.pop()()
    _copies.cache_clear()
    _scratch.cache_clear()


@dataclass
class Copied:
    """A command that runs, or has run, as a copy; has what tests need of `subprocess.Popen`."""

    args: list[str]
    pid: int
    _job: CopiedJob = field(repr=False)
    _output: Path = field(repr=False)

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return (self._output / "out").read_text()

    @property
    def stderr(self) -> str:
        """What it has printed to standard error so far."""
        return (self._output / "err").read_text()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._job.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._job.send_signal(number)

    def wait(self, timeout: float) -> int:
        """Return the exit status; what takes longer than ``timeout`` seconds is killed.

        Raises:
            subprocess.TimeoutExpired: It took longer.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
            time.sleep(POLL_S)
        return status


def is_torch(words: Sequence[str]) -> bool:
    """Return whether a command may be a copy of a process that holds torch: it has nothing to do with Paddle."""
    return "paddle" not in sys.modules and not any("paddle" in word.lower() or word == "fleet" for word in words)


def is_read_at_import(variable: str) -> bool:
    """Return whether a library, or Python, reads a variable before a copy can set it."""
    return READ_AT_IMPORT.match(variable) is not None


def start(*words: str, cwd: Path, env: Mapping[str, str] | None = None) -> Copied:
    """Start ``mtrain`` with ``words`` in the folder ``cwd``. ``env``: its variables; None: those of this process.

    A copy sets those that only its test reads. Each set of the others has a warm process of its own.
    """
    given = os.environ if env is None else env
    own = {
        name: value for name, value in given.items() if os.environ.get(name) != value and not is_read_at_import(name)
    }
    kept = {name: os.environ[name] for name in own.keys() & os.environ.keys()}
    variables = {name: value for name, value in given.items() if name not in OF_A_TEST and name not in own}
    variables = {**ONE_THREAD, **variables, **kept}
    command = [sys.executable, "-m", "mtrain", *words]
    sys.audit(starts.OF_A_COPY, command)
    copies = _copies(tuple(sorted(variables.items())))
    output = Path(tempfile.mkdtemp(dir=_scratch()))
    for name in ("out", "err"):
        (output / name).touch()
    setting = json.dumps({"cwd": str(cwd), "output": str(output), "variables": own})
    pid = copies.start(command, env={**variables, SETTING: setting}, log=output / "log")
    assert pid is not None, f"{command} cannot be started as a copy"
    return Copied(command, pid, CopiedJob(copies, pid), output)


def mtrain(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run ``mtrain`` with ``words`` in the folder ``cwd`` and wait for it, as `subprocess.run` does."""
    process = start(*words, cwd=cwd, env=env)
    status = process.wait(timeout)
    return subprocess.CompletedProcess(process.args, status, process.stdout, process.stderr)


def run(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """Run ``mtrain`` with ``words``: as a copy where that is possible, else as a process that starts cold."""
    if is_torch(words) and (env or os.environ).get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
        return mtrain(*words, cwd=cwd, env=env, timeout=timeout)
    line = [sys.executable, "-m", "mtrain", *words]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@functools.cache
def _scratch() -> str:
    folder = tempfile.TemporaryDirectory(prefix="mtrain-warm-")
    _CLOSING.append(folder.cleanup)
    return folder.name


@functools.cache
def _copies(variables: tuple[tuple[str, str], ...]) -> Copies:
    """Return a warm process for ranks that have these variables, and what a plan adds to them."""
    ahead = Ahead(
        copier="mtrain.backends._torch.forked",
        rank="mtrain.rank.worker",
        rank_words=["--run-dir", "."],
        programs=PROGRAMS,
        parts=PARTS,
    )
    env = environment.join_variables(environment.clean(dict(variables)), RANKS)
    log = Path(_scratch()) / "warm.log"
    with starts.allowed():
        copies = Copies(ahead, env=env, log=log)
    _CLOSING.append(copies.close)
    assert copies.is_ready, log.read_text()
    return copies
