"""Start the ranks of a job on one host with the variables that torchrun gives them, without torchrun.

On one host torchrun decides nothing that its own arguments do not say. It imports torch before it starts the first rank,
and each rank then imports it again; here the ranks are copies of a process that has imported it (``forked``), or processes
that import it by themselves. Rank 0 hosts the store at which the ranks meet (``group.join``).
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Protocol

from mtrain.backends._torch import forked

FAILURE_GRACE_S = 30.0
"""Seconds that the other ranks have to end after SIGTERM when one has failed, or when this process's parent is gone; then
they are killed."""
POLL_S = 0.02
"""Pause between two looks at the ranks, in seconds."""
SCRIPT_MODE = ("--mode", "script")
"""Words of a command that runs a user's script. It may join torch's process group by itself, for which torchrun hosts the
store."""


def fits(argv: Sequence[str]) -> bool:
    """Return whether ``run`` can do what torchrun would do for this command line of torchrun."""
    options = _parsed(argv)
    if options is None or options.nnodes != "1" or options.max_restarts != 0:
        return False
    words = options.command
    return SCRIPT_MODE not in itertools.pairwise(words)


def run(argv: Sequence[str]) -> int:
    """Start the ranks that a command line of torchrun describes, and wait for them.

    When a rank fails, the others get SIGTERM, and a report in torchrun's form is printed. SIGTERM and SIGINT to this
    process are passed on to the ranks as SIGTERM.

    Returns:
        0 if all ranks have ended with 0, otherwise 1.
    """
    options = _parsed(argv)
    assert options is not None, "see fits"
    ranks = _Ranks()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ranks.ask)
    program = forked.program(options.command[0]) if options.module and options.nproc_per_node > 1 else None
    for rank in range(options.nproc_per_node):
        ranks.add(_started(program, options, _variables(rank, options)))
    return ranks.wait()


class _Process(Protocol):
    """The part of a process that ``_Ranks`` needs."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def _started(program: ModuleType | None, options: argparse.Namespace, variables: Mapping[str, str]) -> _Process:
    """Start a rank as a copy of this process that runs ``program``; None: as a process of its own."""
    if program is not None:
        return forked.start(program, options.command[1:], variables)
    python = [sys.executable, "-u", *(["-m"] if options.module else []), *options.command]
    return subprocess.Popen(python, env={**os.environ, **variables})  # noqa: S603


def _parsed(argv: Sequence[str]) -> argparse.Namespace | None:
    """Return the options of a command line of torchrun; None if it has any that are not known here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--log-dir")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        options, unknown = parser.parse_known_args(list(argv))
    except (argparse.ArgumentError, SystemExit):
        return None
    known = not unknown and options.command and not options.command[0].startswith("-")
    return options if known else None


def _variables(rank: int, options: argparse.Namespace) -> Mapping[str, str]:
    """Return the variables that torchrun would add to the environment of a rank."""
    size = str(options.nproc_per_node)
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


class _Ranks:
    """The running ranks of this host, in order."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._parent = os.getppid()
        self._asked = False
        self._kill_at = float("inf")
        """When the ranks that still run are killed, in monotonic time."""

    def add(self, process: _Process) -> None:
        """Add the next rank; a request to end that came before it was started reaches it too."""
        self._processes.append(process)
        if self._asked:
            self._ask(self._processes[-1:])

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks, which save and end. Who has sent it decides how long they may take."""
        del number, frame
        self._asked = True
        self._ask(self._processes)

    def wait(self) -> int:
        """Return 0 when all ranks have ended well; print a report and return 1 if one has not."""
        failed: dict[int, int] = {}
        while self._running(self._processes):
            failed = failed or self._failed()
            now = time.monotonic()
            if self._kill_at == float("inf") and (failed or os.getppid() != self._parent):
                self._kill_at = now + FAILURE_GRACE_S
                self._ask(self._processes)
            if now > self._kill_at:
                for process in self._running(self._processes):
                    process.kill()
            time.sleep(POLL_S)
        failed = failed or self._failed()
        if failed:
            print(self._report(failed), file=sys.stderr, flush=True)
        return 1 if failed else 0

    def _failed(self) -> dict[int, int]:
        """Return the exit status of each rank that has ended with another one than 0."""
        return {rank: process.returncode for rank, process in enumerate(self._processes) if process.returncode}

    def _ask(self, processes: Iterable[_Process]) -> None:
        for process in self._running(processes):
            process.terminate()

    @staticmethod
    def _running(processes: Iterable[_Process]) -> list[_Process]:
        return [process for process in processes if process.poll() is None]

    def _report(self, failed: Mapping[int, int]) -> str:
        """Return what torchrun prints of failed ranks, which ``Torchrun.deaths`` reads."""
        entries = [
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {self._processes[rank].pid})"
            for rank, code in failed.items()
        ]
        return "\n".join(["ranks have failed:", *entries])
