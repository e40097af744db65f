"""Start ranks of Horovod over gloo: on one host through horovodrun, on several through a starter on each host."""

import re
from collections.abc import Sequence
from typing import ClassVar

from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.errors import SpecError
from mtrain.launchers.withheld import withholding
from mtrain.system.diagnosis import status_of_shell
from mtrain.system.launch_options import LaunchOptions
from mtrain.system.placement import rank_environment
from mtrain.system.rank_starter import read_deaths

FAILED_RANK = re.compile(r"^Process (\d+) exit with status code (\d+)\.$", re.MULTILINE)
"""The line that horovodrun prints about a failed rank. The status of a rank ended by a signal is 128 plus the signal's
number."""
KEPT_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
"""A shell that runs the rank as its child and stays alive. To end a rank, horovodrun sends SIGTERM to the children of
the shell that it started, waits 5 s, and kills. A shell such as bash would replace itself with the rank: the signal
would go to the rank's loader processes instead, and the rank would hang and be killed before it has saved anything."""


class Horovodrun(Launcher):
    """Plans horovodrun on one host, and ``mtrain.backends._horovod.multi_host_starter`` on each of several hosts.

    On several hosts, horovodrun would start the ranks of the others over its own ssh sessions, which mtrain could
    neither watch nor end. Restarts are mtrain's (``cluster.max_restarts``); Horovod's elastic mode is not used.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"horovod"})
    agent: ClassVar[bool] = True

    options: Options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return one command per host; they differ in ``--node-rank`` only. Hosts may have different numbers of ranks.

        Raises:
            SpecError: a host has an IPv6 address, which Horovod cannot reach, or occurs twice.
        """
        env = rank_environment(self.options)
        worker = (self.options.python, *argv)
        _check(hosts)
        if len(hosts) == 1:
            return [Command(host=hosts[0].address, argv=(*self._alone(hosts[0], ranks_per_host), *worker), env=env)]
        together = ",".join(f"{host.address}:{host.slots}" for host in hosts)
        return [
            Command(host=host.address, argv=(*self._together(together, node), *worker), env=env)
            for node, host in enumerate(hosts)
        ]

    def _alone(self, host: Host, ranks: int) -> tuple[str, ...]:
        """Return the command that starts all ranks on one host."""
        # horovodrun chooses the port of its rendezvous itself; for one host it uses the loopback interface and refuses any
        # other. This module makes the rendezvous listen at that interface only, too.
        # The cache would create ~/.horovod; without it, horovodrun checks this host at each start, which is quick.
        module = ("-m", "mtrain.backends._horovod.single_host_starter")
        starter = (self.options.python, *module, "--gloo", "--disable-cache", "-np", str(ranks))
        place = ("-H", f"{host.address}:{ranks}")
        # horovodrun writes its whole environment into the command line of each rank's shell, which every user can read.
        keep, restore = (withholding(verb, self.options.python) for verb in ("keep", "restore"))
        return (*keep, *starter, *place, *KEPT_SHELL, *restore)

    def _together(self, hosts: str, node: int) -> tuple[str, ...]:
        """Return the command that starts the ranks of one of several hosts; ``hosts``: all of them with their ranks."""
        return (
            *(self.options.python, "-m", "mtrain.backends._horovod.multi_host_starter"),
            f"--node-rank={node}",
            f"--hosts={hosts}",
            f"--rendezvous={self.options.master_addr}:{self.options.master_port}",
            "--",
        )

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return failed ranks as they are reported. A rank that ended on SIGTERM may have been ended by horovodrun."""
        of_horovodrun = {int(rank): status_of_shell(int(code)) for rank, code in FAILED_RANK.findall(log)}
        return sorted({**of_horovodrun, **dict(read_deaths(log))}.items())


def _check(hosts: Sequence[Host]) -> None:
    addresses = [host.address for host in hosts]
    for address in addresses:
        if ":" in address:
            raise SpecError(
                f"cluster.ips: {address!r} given, which Horovod's rendezvous cannot use; give its IPv4 address"
            )
    if len(set(addresses)) < len(addresses):
        raise SpecError(f"cluster.ips: {', '.join(addresses)} given; give each host once, with its number of ranks")
