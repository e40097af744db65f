"""Run DeepSpeed's own launcher on one host: write its hostfile, and make up for how it ends and reports ranks.

On each host run ``python -m mtrain.backends._deepspeed.starter --hostfile RUN/hostfile --host '10.0.0.1 slots=2' --host
'10.0.0.2 slots=2' --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -- PYTHON -m mtrain.rank.worker ...``. With
``--no_ssh`` DeepSpeed starts the ranks of this host only, and reads no ``.deepspeed_env``.

DeepSpeed's launcher consists of two processes, with these weaknesses:

- The outer process dies of SIGTERM while the inner one and the ranks keep running.
- The outer process reports success when the inner one was killed.
- To end a rank, the inner process also ends the loader processes that the rank needs to save its state.
- Nothing reports which rank failed.
- ``CUDA_VISIBLE_DEVICES`` is overwritten with the numbers of the slots.

So this process asks only the ranks to end, and ends ranks that still run when the launcher is gone. Each rank is
started by a shell that restores the devices and records a failure (``system.rank_starter``).
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from mtrain.errors import LaunchError, MtrainError, PluginError
from mtrain.spec import outputs, remedies
from mtrain.system import processes
from mtrain.system.rank_starter import SHELL_RECORD

REQUEST_GRACE_S = 30.0
"""Time that ranks have to end after they were asked to: they save first."""
LEFTOVER_GRACE_S = 5.0
"""Time that ranks have to end after their launcher has gone."""
POLL_S = 0.05
DEVICES = "CUDA_VISIBLE_DEVICES"
KEPT_DEVICES = "MTRAIN_VISIBLE_DEVICES"
"""Variable that carries the value of ``CUDA_VISIBLE_DEVICES`` past DeepSpeed's launcher."""
RANK = (
    f'export {DEVICES}="${KEPT_DEVICES}"; [ "${{{KEPT_DEVICES}+given}}" ] || unset {DEVICES}; unset {KEPT_DEVICES} DS_ACCELERATOR; '
    f'"$@"; status=$?; [ $status = 0 ] || {SHELL_RECORD}; exit $status'
)
"""Shell script that runs one rank; the command of the rank is its arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher to its end and return its status. If it was killed, this process ends by the same signal."""
    options = _arguments(argv)
    try:
        _check_installed()
        _write(options.hostfile, options.host, node=options.node_rank)
        return _run(_launcher(options), ["sh", "-c", RANK, "sh", *options.command])
    except MtrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mtrain.backends._deepspeed.starter", description="started by `mtrain train`")
    parser.add_argument("--hostfile", type=Path, required=True, help="file that is written for DeepSpeed")
    parser.add_argument("--host", action="append", required=True, help="'ADDRESS slots=N' of every host, in order")
    parser.add_argument("--node-rank", type=int, required=True, help="number of this host, from 0")
    parser.add_argument("--master-addr", required=True, help="address of the first host")
    parser.add_argument("--master-port", type=int, required=True, help="port on the first host at which ranks meet")
    parser.add_argument("command", nargs="+", help="what a rank runs")
    return parser.parse_args(argv)


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise PluginError(
            f"launcher deepspeed: {sys.executable} has no DeepSpeed; install it with: "
            f"{remedies.install('deepspeed', python=sys.executable)}, or use --launcher torchrun"
        )


def _write(hostfile: Path, hosts: Sequence[str], *, node: int) -> None:
    """Write the hostfile atomically: hosts may share the folder, and each then writes the same content."""
    try:
        outputs.write_text(hostfile, "".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise LaunchError(f"{hostfile} cannot be written: {error.strerror or error}") from error


def _launcher(options: argparse.Namespace) -> list[str]:
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(options.hostfile)),
        *("--no_ssh", "--node_rank", str(options.node_rank)),
        *("--master_addr", options.master_addr, "--master_port", str(options.master_port)),
        *("--no_local_rank", "--no_python", "--log_level", "warning"),
    ]


def _environment(caller: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the launcher.

    The launcher computes nothing itself, so its device is the CPU: it then behaves alike on every machine.
    """
    env = {name: value for name, value in caller.items() if name != KEPT_DEVICES} | {"DS_ACCELERATOR": "cpu"}
    return env | ({KEPT_DEVICES: caller[DEVICES]} if DEVICES in caller else {})


def _run(launcher: Sequence[str], rank: Sequence[str]) -> int:
    """Run the launcher with the command ``rank`` for each rank until all have ended; return the launcher's status."""
    command = [*launcher, *rank]
    print(shlex.join(command), flush=True)
    with processes.Requests() as requests, processes.adopting_orphans():
        with processes.sparing_children():
            process = subprocess.Popen(command, env=_environment(os.environ), stdin=subprocess.DEVNULL)  # noqa: S603
        deadline = float("inf")
        while process.poll() is None and time.monotonic() < deadline:
            if requests.any() and deadline == float("inf"):
                _ask(rank)
                deadline = time.monotonic() + REQUEST_GRACE_S
            processes.reap(spare=process.pid)
            time.sleep(POLL_S)
        orphans = _ranks(rank)
        if orphans or process.poll() is None:
            processes.end_all(spare=frozenset(), grace_s=0.0 if requests.any() else LEFTOVER_GRACE_S)
        status = process.wait()
    if status < 0 or (orphans and status == 0):
        cause = f"was ended by signal {-status}" if status < 0 else "was killed"
        print(f"error: DeepSpeed's launcher {cause}; its ranks were ended", file=sys.stderr, flush=True)
        if not requests.any():
            _end_by(signal.Signals(-status) if status < 0 else signal.SIGKILL)
        return 1
    return status


def _end_by(number: signal.Signals) -> None:
    """End this process by signal ``number``, which shows its parent that the launcher was killed and no rank failed."""
    with contextlib.suppress(OSError):  # SIGKILL needs no handler and takes none
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _ask(rank: Sequence[str]) -> None:
    """Ask the ranks to end, but neither their shells nor the processes that a rank started."""
    for shell in _ranks(rank):
        processes.send(shell.children(), signal.SIGTERM)


def _ranks(rank: Sequence[str]) -> list[psutil.Process]:
    """Return the shells of the ranks that are running."""
    return [process for process in processes.descendants() if _command_line(process) == list(rank)]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    sys.exit(main())
