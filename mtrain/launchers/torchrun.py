"""Ranks through PyTorch's own starter, torchrun (``torch.distributed.run``), with a static rendezvous."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces import Command, Host
from mtrain.system.placement import LaunchOptions, rank_environment

FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
"""One entry of the ``ChildFailedError`` report that torchrun prints."""
LOG_FOLDER = "torchrun"
"""Beside the logs of the ranks."""


class Torchrun:
    """One agent per host, which starts the ranks of that host.

    ``mtrain.backends._torch.starter`` runs torchrun with a store that listens at the address of the first host alone. The
    static rendezvous needs nothing but an address and a port; restarts are ours (``cluster.max_restarts``), from the
    newest checkpoint, so torchrun's own are switched off.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"torch"})
    agent: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """One command per host, differing in ``--node-rank`` and, where hosts have other numbers of ranks, in that."""
        env = rank_environment(self.options)
        return [
            Command(
                host=host.address,
                argv=(*self._starter(len(hosts), node, host.slots), *_log_folder(argv), *argv),
                env=env,
            )
            for node, host in enumerate(hosts)
        ]

    def _starter(self, nodes: int, node: int, ranks: int) -> tuple[str, ...]:
        place = () if nodes == 1 else (f"--node-rank={node}",)
        return (
            *(
                self.options.python,
                "-m",
                "mtrain.backends._torch.starter",
                f"--nnodes={nodes}",
                *place,
                f"--nproc-per-node={ranks}",
            ),
            f"--master-addr={self.options.master_addr}",
            f"--master-port={self.options.master_port}",
            "--max-restarts=0",
        )

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Failed ranks as torchrun reports them; an entry stands for each even where several fell at once."""
        found = {int(rank): int(code) for rank, code in FAILED_RANK.findall(log)}
        return sorted(found.items())


def _log_folder(argv: Sequence[str]) -> tuple[str, ...]:
    """Where torchrun makes its folders: inside the run folder that the ranks are given. It leaves them, elsewhere in TMPDIR."""
    words = list(argv)
    if "--run-dir" not in words:
        return ()
    return (f"--log-dir={Path(words[words.index('--run-dir') + 1]) / 'logs' / LOG_FOLDER}",)
