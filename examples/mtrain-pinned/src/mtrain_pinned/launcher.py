"""The launcher plugin `pinned`: plans one small starter per host, for ranks of torch and of Paddle."""

import re
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.errors import SpecError
from mtrain.spec.hostnames import bracket_host
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import rank_environment

FAILED_RANK = re.compile(r"^pinned: rank (\d+) ended with status (-?\d+)$", re.MULTILINE)
"""The line that `starter.py` prints about a rank that has failed by itself."""
LAST_PORT = 65535


class Pinned(Launcher):
    """Plans one `mtrain_pinned.starter` per host, which starts the ranks of that host and waits for them."""

    class Options(LaunchOptions):
        """What every launcher gets from the plan, and the keys of `launcher.options`."""

        pin: bool = Field(default=True, description="each rank runs on cores of its own; false: on all of them")
        grace_s: float = Field(default=10.0, gt=0, description="seconds in which ranks may end after one has failed")

    provides: frozenset[str] = frozenset({"torch", "paddle"})
    takes_names: ClassVar[bool] = False  # Paddle's ranks cannot use names

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        options = self.options
        endpoints = self._endpoints(hosts)
        first_rank, commands = 0, []
        for host in hosts:
            starter = (
                *(options.python, "-m", "mtrain_pinned.starter"),
                *("--first-rank", str(first_rank), "--ranks", str(host.slots)),
                *("--master", bracket_host(options.master_addr), str(options.master_port)),
                *("--endpoints", ",".join(endpoints), "--grace-s", f"{options.grace_s:g}"),
                *(("--pin",) if options.pin else ()),
            )
            rank = (options.python, *argv)
            commands.append(Command(host=host.address, argv=(*starter, "--", *rank), env=rank_environment(options)))
            first_rank += host.slots
        return commands

    def _endpoints(self, hosts: Sequence[Host]) -> list[str]:
        """Return address and port of every rank, for Paddle: torch's ranks need those of the first one only."""
        options = self.options
        first_port = options.start_port or options.master_port + 1
        last_port = first_port + max(host.slots for host in hosts) - 1
        if last_port > LAST_PORT:
            key = "cluster.start_port" if options.start_port else "cluster.master_port"
            raise SpecError(f"{key}: the ranks take the ports {first_port} to {last_port}; give a smaller one")
        return [f"{bracket_host(host.address)}:{first_port + number}" for host in hosts for number in range(host.slots)]

    @override
    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        return sorted((int(rank), int(code)) for rank, code in FAILED_RANK.findall(log)) if status else []
