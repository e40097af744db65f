"""Start ranks through DeepSpeed's own launcher (``python -m deepspeed.launcher.runner``), separately on each host."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.system.diagnosis import status_of_shell
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import rank_environment, run_dir_in
from mtrain.system.rank_starter import read_deaths


class DeepSpeedLauncher(Launcher):
    """Plans one process per host, ``mtrain.backends._deepspeed.starter``, which starts the ranks of its host.

    That process writes the hostfile, starts DeepSpeed's launcher for its own host alone (``--no_ssh``), and does what
    that one leaves undone.

    DeepSpeed is imported twice before the first rank starts, some five seconds of CPU time more than under torchrun. So
    this launcher is used only where it is requested, or where no other one is enabled.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"torch"})
    agent: ClassVar[bool] = True
    automatic: ClassVar[bool] = False

    options: Options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return one command per host; they differ in ``--node-rank`` only.

        Hosts may have different numbers of ranks.
        """
        env = rank_environment(self.options)
        return [
            Command(host=host.address, argv=(*self._agent(argv, hosts, node), self.options.python, *argv), env=env)
            for node, host in enumerate(hosts)
        ]

    def _agent(self, argv: Sequence[str], hosts: Sequence[Host], node: int) -> tuple[str, ...]:
        options = self.options
        return (
            *(options.python, "-m", "mtrain.backends._deepspeed.starter"),
            f"--hostfile={(run_dir_in(argv) or Path()) / 'hostfile'}",
            *(f"--host={host.address} slots={host.slots}" for host in hosts),
            f"--node-rank={node}",
            f"--master-addr={options.master_addr}",
            f"--master-port={options.master_port}",
            "--",
        )

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return failed ranks as their shells record them; DeepSpeed reports the status only.

        A rank with SIGTERM may have been ended by DeepSpeed's launcher.
        """
        return sorted({rank: status_of_shell(code) for rank, code in read_deaths(log)}.items())
