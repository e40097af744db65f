"""Start ranks through PyTorch's own starter, torchrun (``torch.distributed.run``), with a static rendezvous."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import rank_environment, run_dir_in
from mtrain.system.rank_starter import read_deaths, runs_script

FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
"""One entry of the ``ChildFailedError`` report that torchrun prints."""
LOG_FOLDER = "torchrun"
"""Folder of torchrun's own files, beside the logs of the ranks."""


class Torchrun(Launcher):
    """Plans one torchrun per host, which starts the ranks of that host.

    ``mtrain.backends._torch.ranks.starter`` starts the ranks as torchrun does but without torchrun, which would import torch
    first. For scripts on several hosts it runs torchrun, with a store that listens at the address of the first host only. The
    static rendezvous needs nothing but an address and a port. torchrun's restarts are off: mtrain restarts from the newest
    checkpoint (``cluster.max_restarts``).
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"torch"})
    agent: ClassVar[bool] = True
    forwards_signals: ClassVar[bool] = True

    options: Options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return one command per host.

        They differ in the numbers of the host and of its first rank, and in the number of ranks where hosts differ in it.
        """
        env, run_dir = rank_environment(self.options), run_dir_in(argv)
        # By default, torchrun leaves its log folders in TMPDIR.
        logs = () if run_dir is None else (f"--log-dir={run_dir / 'logs' / LOG_FOLDER}",)
        *firsts, size = accumulate((host.slots for host in hosts), initial=0)
        # Only torchrun hosts the store of a script's ranks until those of all hosts have ended, and it numbers them itself.
        numbered = len(hosts) > 1 and not runs_script(argv)
        numbers = [(f"--first-rank={first}", f"--world-size={size}") if numbered else () for first in firsts]
        return [
            Command(
                host=host.address,
                argv=(*self._starter(len(hosts), node, host.slots), *numbers[node], *logs, *argv),
                env=env,
            )
            for node, host in enumerate(hosts)
        ]

    def _starter(self, nodes: int, node: int, ranks: int) -> tuple[str, ...]:
        place = () if nodes == 1 else (f"--node-rank={node}",)
        return (
            *(self.options.python, "-m", "mtrain.backends._torch.ranks.starter"),
            *(f"--nnodes={nodes}", *place, f"--nproc-per-node={ranks}"),
            f"--master-addr={self.options.master_addr}",
            f"--master-port={self.options.master_port}",
            "--max-restarts=0",
        )

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return failed ranks as torchrun or the starter reports them, all of them where several have failed at once."""
        of_torchrun = {int(rank): int(code) for rank, code in FAILED_RANK.findall(log)}
        return sorted({**of_torchrun, **dict(read_deaths(log))}.items())
