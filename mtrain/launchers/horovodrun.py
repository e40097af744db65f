"""Ranks of Horovod over gloo: on one host through horovodrun (``horovod.runner.launch``), on several per host."""

import re
from collections.abc import Sequence
from typing import ClassVar

from mtrain.core.interfaces import Command, Host
from mtrain.errors import SpecError
from mtrain.system.diagnosis import status_of_shell
from mtrain.system.placement import LaunchOptions, rank_environment

FAILED_RANK = re.compile(r"^Process (\d+) exit with status code (\d+)\.$", re.MULTILINE)
"""What is printed of a rank that failed; of one that a signal ended, 128 and the signal's number."""
KEPT_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
"""Runs the rank as a child of its own. To end a rank, horovodrun sends SIGTERM to the children of the shell that it started,
waits 5 s, and kills. A shell like bash has become the rank itself by then: the rank's loader processes would get the signal,
and the rank would be frozen and killed before it has saved anything."""


class Horovodrun:
    """On one host one agent, horovodrun. On several one agent per host, ``mtrain.backends._horovod.multi_host_starter``, which starts the
    ranks of that host: horovodrun would start those of the others over ssh sessions that nobody else can watch and end.

    Restarts are ours (``cluster.max_restarts``): this is no elastic job.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"horovod"})
    agent: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """One command per host, differing in ``--node-rank`` alone. Hosts may have different numbers of ranks.

        Raises:
            SpecError: a host has an address of IPv6, which Horovod cannot reach, or occurs twice.
        """
        env = rank_environment(self.options)
        worker = (self.options.python, *argv)
        _check(hosts)
        if len(hosts) == 1:
            return [Command(host=hosts[0].address, argv=(*self._alone(hosts[0], ranks_per_host), *worker), env=env)]
        return [
            Command(host=host.address, argv=(*self._together(hosts, node), *worker), env=env)
            for node, host in enumerate(hosts)
        ]

    def _alone(self, host: Host, ranks: int) -> tuple[str, ...]:
        """Its rendezvous takes a port of its own; it takes the loopback interface and refuses another.

        ``mtrain.backends._horovod.single_host_starter`` runs horovodrun so that the rendezvous, too, is on that interface alone.
        """
        # Without the cache it looks at this host each time, which is quick, and leaves no ~/.horovod behind.
        module = ("-m", "mtrain.backends._horovod.single_host_starter")
        starter = (self.options.python, *module, "--gloo", "--disable-cache", "-np", str(ranks))
        place = ("-H", f"{host.address}:{ranks}")
        return (*self._withheld("keep"), *starter, *place, *KEPT_SHELL, *self._withheld("restore"))

    def _withheld(self, verb: str) -> tuple[str, ...]:
        """horovodrun writes its whole environment into the command line of each rank's shell, which every user can read."""
        return (self.options.python, "-m", "mtrain.launchers.withheld", verb)

    def _together(self, hosts: Sequence[Host], node: int) -> tuple[str, ...]:
        return (
            *(self.options.python, "-m", "mtrain.backends._horovod.multi_host_starter"),
            f"--node-rank={node}",
            "--hosts=" + ",".join(f"{host.address}:{host.slots}" for host in hosts),
            f"--rendezvous={self.options.master_addr}:{self.options.master_port}",
            "--",
        )

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Failed ranks as they are reported; one that ended on SIGTERM may have been ended by horovodrun."""
        found = {int(rank): status_of_shell(int(code)) for rank, code in FAILED_RANK.findall(log)}
        return sorted(found.items())


def _check(hosts: Sequence[Host]) -> None:
    addresses = [host.address for host in hosts]
    for address in addresses:
        if ":" in address:
            raise SpecError(
                f"cluster.ips: {address!r} given, which Horovod's rendezvous cannot use; give its IPv4 address"
            )
    if len(set(addresses)) < len(addresses):
        raise SpecError(f"cluster.ips: {', '.join(addresses)} given; give each host once, with its number of ranks")
