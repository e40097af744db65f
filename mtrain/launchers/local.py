"""Start one rank on this machine, without any launcher."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.errors import SpecError
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import rank_environment


class Local(Launcher):
    """Starts the one rank of a job that needs no rendezvous."""

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"none"})
    agent: ClassVar[bool] = False

    options: Options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return the one command.

        Raises:
            SpecError: more than one host or rank is requested.
        """
        if len(hosts) > 1 or ranks_per_host > 1:
            raise SpecError(
                f"cluster: {len(hosts)} host(s) x {ranks_per_host} rank(s) given, but this backend trains in one "
                "process; use one host and --nproc-per-node 1, or another --backend"
            )
        return [Command(host=hosts[0].address, argv=(self.options.python, *argv), env=rank_environment(self.options))]

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return rank 0 where the command failed: the command is the rank, so its status is the rank's."""
        return [(0, status)] if status else []
