"""Ranks through Horovod's own starter, ``python -m horovod.runner.launch`` (``horovodrun``), over gloo."""

import re
from collections.abc import Sequence
from typing import ClassVar

from mtrain.core.interfaces import Command, Host
from mtrain.core.placement import LaunchOptions, rank_environment

FAILED_RANK = re.compile(r"^Process (\d+) exit with status code (\d+)\.$", re.MULTILINE)
"""What horovodrun prints of a rank that failed; of one that a signal ended, 128 and the signal's number."""
START_TIMEOUT_S = 60
"""For looking at all hosts before ranks are started."""
KEPT_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
"""Runs the rank as a child of its own. To end a rank, horovodrun sends SIGTERM to the children of the shell that it started,
waits 5 s, and kills. A shell like bash has become the rank itself by then: the rank's loader processes would get the signal,
and the rank would be frozen and killed before it has saved anything."""


class Horovodrun:
    """One agent on the first host, which starts the ranks of every host: those of the others over ssh.

    Its rendezvous takes a port of its own. Restarts are ours (``cluster.max_restarts``): this is no elastic job.
    """

    class Options(LaunchOptions):
        """Nothing beyond what every launcher takes."""

    provides: frozenset[str] = frozenset({"horovod"})
    agent: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """One command, for the first host."""
        starter = (
            *(self.options.python, "-m", "horovod.runner.launch", "--gloo"),
            *("-np", str(ranks_per_host * len(hosts))),
            *("-H", ",".join(f"{host.address}:{ranks_per_host}" for host in hosts)),
        )
        command = (*starter, *self._between(hosts), *self._devices(hosts), *KEPT_SHELL, self.options.python, *argv)
        return [Command(host=hosts[0].address, argv=command, env=rank_environment(self.options))]

    def _between(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Options for several hosts; on one, horovodrun takes the loopback interface and refuses another."""
        if len(hosts) == 1:
            return ()
        interface = self.options.interface
        named = () if interface is None else ("--network-interfaces", interface)
        return ("--start-timeout", str(START_TIMEOUT_S), "--disable-cache", *named)

    def _devices(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """The one variable of the environment that horovodrun does not pass on over ssh."""
        devices = self.options.devices
        if len(hosts) == 1 or devices is None:
            return ()
        return ("env", f"CUDA_VISIBLE_DEVICES={','.join(str(device) for device in devices)}")

    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Failed ranks as horovodrun reports them; one that ended on SIGTERM may have been ended by horovodrun."""
        found = {int(rank): _status(int(code)) for rank, code in FAILED_RANK.findall(log)}
        return sorted(found.items())


def _status(code: int) -> int:
    """A shell's exit status as that of a process: negative for a signal."""
    return 128 - code if code > 128 else code
