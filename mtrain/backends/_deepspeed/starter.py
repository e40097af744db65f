"""DeepSpeed's own launcher on one host: the hostfile that it reads, and what it leaves undone.

On each host ``python -m mtrain.backends._deepspeed.starter --hostfile RUN/hostfile --host '10.0.0.1 slots=2' --host '10.0.0.2 slots=2'
--node-rank 1 --master-addr 10.0.0.1 --master-port 29500 -- PYTHON -m mtrain.rank.worker ...``. With ``--no_ssh`` DeepSpeed starts the
ranks of this host, and reads no ``.deepspeed_env``.

Its launcher is two processes. The outer one dies of SIGTERM and leaves the inner one, with the ranks, behind; and it says that all
went well when the inner one was killed. To end a rank, the inner one also ends the loader processes that the rank needs to save.
It does not tell which rank failed, and puts the numbers of the slots into ``CUDA_VISIBLE_DEVICES``, whatever was there. So this
process asks the ranks, and no others, to end; looks whether ranks are left when the launcher has gone; and has each rank started
by a shell that puts the devices back and reports a failure: ``rank 3 ended with status 137``.
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
from mtrain.spec import remedies
from mtrain.system import processes

REQUEST_GRACE_S = 30.0
"""For ranks that were asked to end: they save first."""
LEFTOVER_GRACE_S = 5.0
"""For ranks that have lost their launcher."""
POLL_S = 0.05
DEVICES = "CUDA_VISIBLE_DEVICES"
KEPT_DEVICES = "MTRAIN_VISIBLE_DEVICES"
"""Carries the former past DeepSpeed's launcher."""
RANK = (
    f'export {DEVICES}="${KEPT_DEVICES}"; [ "${{{KEPT_DEVICES}+given}}" ] || unset {DEVICES}; unset {KEPT_DEVICES} DS_ACCELERATOR; '
    '"$@"; status=$?; [ $status = 0 ] || echo "rank $RANK ended with status $status"; exit $status'
)
"""What the shell of a rank does; the command of the rank is its arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher to its end; returns its status. Where it was killed this process ends by the same signal."""
    given = _arguments(argv)
    try:
        _check_installed()
        _write(given.hostfile, given.host, node=given.node_rank)
        return _run(_launcher(given), ["sh", "-c", RANK, "sh", *given.command])
    except MtrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mtrain.backends._deepspeed.starter", description="started by `mtrain train`")
    parser.add_argument("--hostfile", type=Path, required=True, help="is written")
    parser.add_argument("--host", action="append", required=True, help="'ADDRESS slots=N' of every host, in order")
    parser.add_argument("--node-rank", type=int, required=True, help="place of this host among them")
    parser.add_argument("--master-addr", required=True, help="of the first host")
    parser.add_argument("--master-port", type=int, required=True, help="where ranks meet on it")
    parser.add_argument("command", nargs="+", help="what a rank runs")
    return parser.parse_args(argv)


def _check_installed() -> None:
    if find_spec("deepspeed") is None:
        raise PluginError(
            f"launcher deepspeed: {sys.executable} has no DeepSpeed; install it with: "
            f"{remedies.install('deepspeed', python=sys.executable)}, or use --launcher torchrun"
        )


def _write(hostfile: Path, hosts: Sequence[str], *, node: int) -> None:
    """Hosts that share the folder write the same; nobody reads half of it."""
    written = hostfile.with_name(f"{hostfile.name}.{node}")
    try:
        written.write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
        written.replace(hostfile)
    except OSError as error:
        raise LaunchError(f"{hostfile} cannot be written: {error.strerror or error}") from error


def _launcher(given: argparse.Namespace) -> list[str]:
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(given.hostfile)),
        *("--no_ssh", "--node_rank", str(given.node_rank)),
        *("--master_addr", given.master_addr, "--master_port", str(given.master_port)),
        *("--no_local_rank", "--no_python", "--log_level", "warning"),
    ]


def _environment(caller: Mapping[str, str]) -> dict[str, str]:
    """The launcher itself computes nothing: told to be on the CPU, it does the same on every machine."""
    env = {name: value for name, value in caller.items() if name != KEPT_DEVICES} | {"DS_ACCELERATOR": "cpu"}
    return env | ({KEPT_DEVICES: caller[DEVICES]} if DEVICES in caller else {})


def _run(launcher: Sequence[str], rank: Sequence[str]) -> int:
    command = [*launcher, *rank]
    print(shlex.join(command), flush=True)
    with processes.Requests() as requests, processes.adopting_orphans():
        process = subprocess.Popen(command, env=_environment(os.environ), stdin=subprocess.DEVNULL)  # noqa: S603
        deadline = float("inf")
        while process.poll() is None and time.monotonic() < deadline:
            if requests.any() and deadline == float("inf"):
                _ask(rank)
                deadline = time.monotonic() + REQUEST_GRACE_S
            processes.reap(spare=process.pid)
            time.sleep(POLL_S)
        lost = _ranks(rank)
        if lost or process.poll() is None:
            processes.end_all(spare=frozenset(), grace_s=0.0 if requests.any() else LEFTOVER_GRACE_S)
        status = process.wait()
    if status < 0 or (lost and status == 0):
        how = f"was ended by signal {-status}" if status < 0 else "was killed"
        print(f"error: DeepSpeed's launcher {how}; its ranks were ended", file=sys.stderr, flush=True)
        if not requests.any():
            _end_by(signal.Signals(-status) if status < 0 else signal.SIGKILL)
        return 1
    return status


def _end_by(number: signal.Signals) -> None:
    """End this process by ``number``: whoever started it sees that the launcher was killed, and that no rank had failed."""
    with contextlib.suppress(OSError):  # SIGKILL needs no handler and takes none
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _ask(rank: Sequence[str]) -> None:
    """Ask the ranks to end, not their shells, nor the processes that a rank started."""
    for shell in _ranks(rank):
        processes.send(shell.children(), signal.SIGTERM)


def _ranks(rank: Sequence[str]) -> list[psutil.Process]:
    """The shells of the ranks that run."""
    return [process for process in processes.descendants() if _words(process) == list(rank)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    sys.exit(main())
