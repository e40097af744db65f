"""Ranks through Paddle's own starter, ``python -m paddle.distributed.launch`` (``fleetrun``), in the form that works."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces import Command, Host
from mtrain.errors import SpecError
from mtrain.system.placement import LaunchOptions, rank_environment

FAILED_RANK = re.compile(r"^Container rank (\d+) status failed .* code (-?\d+) log ", re.MULTILINE)
"""The rank within this host, and its exit status, of the first failed process in Paddle's order."""
PLACE = re.compile(r"^LAUNCH INFO \S+ \S+ (rank|nproc_per_node): (-?\d+)$", re.MULTILINE)
"""Where the agent says which host it is of."""
LAST_PORT = 65535
LOG_FOLDER = "fleetrun"
"""Beside the logs of the ranks, for what Paddle's agent writes."""


class Fleetrun:
    """One agent per host, which starts the ranks of that host.

    Always with ``--master`` and an explicit ``--rank`` and ``--host``: without the first, one argument that Paddle does not
    know switches to a launcher of former times; without the others a host finds its place by its own name, which is
    often 127.0.1.1, and becomes a second rank 0. Paddle's own restarts are off: ours begin from the newest checkpoint.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"paddle"})
    agent: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """One command per host, differing in ``--rank`` and ``--host`` alone.

        What the agent starts is the interpreter, so that ``argv`` may name a module.

        Raises:
            SpecError: a host is an address of IPv6, which Paddle splits at the wrong colon, or a name without a dot, in whose
                place it puts what the host thinks its address is; or there are fewer devices than ranks.
        """
        for address in (self.options.master_addr, *(host.address for host in hosts)):
            if ":" in address or "." not in address:
                raise SpecError(
                    f"cluster.ips: {address!r} given, which Paddle's launcher cannot take for a host; give its IPv4 address"
                )
        if self.options.devices and len(self.options.devices) < ranks_per_host:
            raise SpecError(
                f"cluster.devices: {list(self.options.devices)} given for {ranks_per_host} ranks, and Paddle's launcher gives "
                "each rank one of its own; give as many, or fewer ranks"
            )
        if len({host.slots for host in hosts}) > 1:
            raise SpecError(
                f"cluster.slots: {[host.slots for host in hosts]} given, and Paddle's launcher starts as many ranks on every "
                "host; give the same number for each"
            )
        last = (self.options.start_port or 0) + ranks_per_host
        if last > LAST_PORT:
            raise SpecError(
                f"cluster.start_port: {self.options.start_port} given; {ranks_per_host} ranks and the launcher take the ports up to "
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
        """With ``--master`` Paddle takes the ports of the ranks, and one more, out of ``PORT_RANGE``, not ``--start_port``.

        Several agents meet over HTTP, which a proxy of the caller's would take for ever to reach.

        An empty ``CUDA_VISIBLE_DEVICES`` is one device to it, named "", and it finds none for the second rank. "all" makes it
        look for itself, and is no device to CUDA.
        """
        env = rank_environment(self.options)
        if self.options.devices == ():
            env["CUDA_VISIBLE_DEVICES"] = "all"
        if len(hosts) > 1:
            addresses = (self.options.master_addr, *(host.address for host in hosts))
            env["no_proxy"] = ",".join(dict.fromkeys(addresses))
        if self.options.start_port is not None:
            env["PORT_RANGE"] = f"{self.options.start_port}:{self.options.start_port + ranks}"
        return env

    def _starter(self, host: Host, nodes: int, node: int, ranks: int, argv: Sequence[str]) -> tuple[str, ...]:
        options = self.options
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
            "--log_dir": _log_folder(argv) if nodes == 1 else f"{_log_folder(argv)}-{node}",
        }
        given = [word for name, value in words.items() if value is not None for word in (name, value)]
        return (*self._withheld("keep"), options.python, "-m", "paddle.distributed.launch", *given)

    def _rank(self, argv: Sequence[str]) -> tuple[str, ...]:
        return (*self._withheld("restore"), self.options.python, *argv)

    def _withheld(self, verb: str) -> tuple[str, ...]:
        """Paddle writes the whole environment of its launcher and of each rank into its log folder."""
        return (self.options.python, "-m", "mtrain.launchers.withheld", verb)

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """The failed rank that Paddle names; it names one even where several fell."""
        place = {name: max(0, int(value)) for name, value in PLACE.findall(log)}
        first = place.get("rank", 0) * place.get("nproc_per_node", 0)
        return sorted({(first + int(rank), int(code)) for rank, code in FAILED_RANK.findall(log)})


def _log_folder(argv: Sequence[str]) -> str:
    """Inside the run folder that the ranks are given."""
    words = list(argv)
    run_dir = Path(words[words.index("--run-dir") + 1]) if "--run-dir" in words else Path()
    return str(run_dir / "logs" / LOG_FOLDER)
