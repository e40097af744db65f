"""Start ranks through Paddle's own starter, ``python -m paddle.distributed.launch`` (``fleetrun``)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.errors import SpecError
from mtrain.launchers.withheld import withholding
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import QUIET_PORTS, rank_environment, run_dir_in
from mtrain.system.rank_starter import runs_script

FAILED_RANK = re.compile(r"^Container rank (\d+) status failed .* code (-?\d+) log ", re.MULTILINE)
"""Paddle's line about the first failed process in its order: the rank within this host, and the exit status."""
PLACE = re.compile(r"^LAUNCH INFO \S+ \S+ (rank|nproc_per_node): (-?\d+)$", re.MULTILINE)
"""Paddle's lines with the index of its host and the number of ranks on a host."""
LAST_PORT = 65535
LOG_FOLDER = "fleetrun"
"""Folder of the files that Paddle's launcher writes, beside the logs of the ranks."""


class Fleetrun(Launcher):
    """Plans one process of Paddle's launcher per host, which starts the ranks of that host.

    ``--master``, ``--rank`` and ``--host`` are always given. Without ``--master``, Paddle switches to an older launcher
    as soon as there is an argument that it does not know. Without the others, a host determines its index from its own
    name, which often means 127.0.1.1, and becomes a second rank 0. Paddle's own restarts are off: mtrain restarts from
    the newest checkpoint.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"paddle"})
    agent: ClassVar[bool] = True
    takes_names: ClassVar[bool] = False

    options: Options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return one command per host; they differ in ``--rank`` and ``--host`` only.

        Paddle's launcher starts the interpreter as a program, so that ``argv`` may begin with ``-m`` and a module.

        Raises:
            SpecError: a host is an IPv6 address, which Paddle splits at the wrong colon; or there are fewer devices
                than ranks; or hosts have different numbers of ranks; or the ports of the ranks would exceed 65535.
        """
        for address in (self.options.master_addr, *(host.address for host in hosts)):
            if ":" in address:
                raise SpecError(
                    f"cluster.ips: {address!r} given, which Paddle's launcher cannot take for a host; give its IPv4 "
                    "address"
                )
        if self.options.devices and len(self.options.devices) < ranks_per_host:
            raise SpecError(
                f"cluster.devices: {list(self.options.devices)} given for {ranks_per_host} ranks, and Paddle's "
                "launcher gives "
                "each rank one of its own; give as many, or fewer ranks"
            )
        if len({host.slots for host in hosts}) > 1:
            raise SpecError(
                f"cluster.slots: {[host.slots for host in hosts]} given, and Paddle's launcher starts as many ranks "
                "on every "
                "host; give the same number for each"
            )
        last = (self.options.start_port or 0) + ranks_per_host
        if last > LAST_PORT:
            raise SpecError(
                f"cluster.start_port: {self.options.start_port} given; {ranks_per_host} ranks and the launcher take "
                "the ports up to "
                f"{last}, and the last one is {LAST_PORT}; give {LAST_PORT - ranks_per_host} or less"
            )
        env = self._environment(hosts, ranks_per_host)
        return [
            Command(
                host=host.address,
                argv=(*self._starter(host, len(hosts), node, ranks_per_host, argv), *self._rank(argv)),
                env=env,
            )
            for node, host in enumerate(hosts)
        ]

    def _environment(self, hosts: Sequence[Host], ranks: int) -> dict[str, str]:
        """Return the variables that the launcher needs, in addition to those of the ranks."""
        env = rank_environment(self.options)
        if self.options.devices == ():
            # Paddle counts an empty value as one device named "", and has none left for the second rank. With "all" it
            # determines the devices itself; CUDA sees no device under that name.
            env["CUDA_VISIBLE_DEVICES"] = "all"
        if len(hosts) > 1:
            # The launchers of several hosts meet over HTTP; through the user's proxy they would never reach one
            # another.
            addresses = (self.options.master_addr, *(host.address for host in hosts))
            env["no_proxy"] = ",".join(dict.fromkeys(addresses))
        if self.options.start_port is not None:
            # With --master, Paddle takes the ports of the ranks, and one more, from PORT_RANGE instead of --start_port.
            env["PORT_RANGE"] = f"{self.options.start_port}:{self.options.start_port + ranks}"
        elif len(hosts) == 1:
            # By default Paddle takes ports that the system also gives to outgoing connections, before the ranks listen.
            env["PORT_RANGE"] = f"{QUIET_PORTS.start}:{QUIET_PORTS.stop - 1}"
        return env

    def _starter(self, host: Host, nodes: int, node: int, ranks: int, argv: Sequence[str]) -> tuple[str, ...]:
        options = self.options
        logs = str((run_dir_in(argv) or Path()) / "logs" / LOG_FOLDER)
        words = {
            "--master": f"{options.master_addr}:{options.master_port}",
            "--nnodes": str(nodes),
            "--rank": str(node),
            "--host": host.address,
            "--nproc_per_node": str(ranks),
            "--devices": ",".join(map(str, options.devices)) if options.devices else None,
            "--start_port": None if options.start_port is None else str(options.start_port),
            "--run_mode": "collective",
            "--max_restart": "0",
            "--log_dir": logs if nodes == 1 else f"{logs}-{node}",
        }
        flags = [word for name, value in words.items() if value is not None for word in (name, value)]
        program = "paddle.distributed.launch" if runs_script(argv) else "mtrain.backends.paddle_launch"
        # Paddle writes its environment into its log folder, so it does not get to see the user's.
        return (*withholding("keep", options.python), options.python, "-m", program, *flags)

    def _rank(self, argv: Sequence[str]) -> tuple[str, ...]:
        return (*withholding("restore", self.options.python), self.options.python, *argv)

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return the failed rank that Paddle names: one, even where several have failed."""
        place = {name: max(0, int(value)) for name, value in PLACE.findall(log)}
        first = place.get("rank", 0) * place.get("nproc_per_node", 0)
        return sorted({(first + int(rank), int(code)) for rank, code in FAILED_RANK.findall(log)})

    def own_logs(self, command: Command) -> str | None:
        """Return Paddle's log folder: where there are GPUs, its launcher adds a line for each every five seconds."""
        return command.argv[list(command.argv).index("--log_dir") + 1]
