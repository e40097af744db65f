"""Describe to a plan this machine, and the hosts that have already reported."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain.spec.config import Loaded
from mtrain.system import environment, placement

SEVERAL_HOSTS_PORT = 29500
"""Default rendezvous port of a job on several hosts: a fixed one, which every host knows without asking the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The facts about this machine on which a plan depends besides the spec."""

    cores: int
    devices: int
    addresses: Sequence[tuple[str, str]] = ()
    """(interface, address) of every address of this machine."""
    python: str = "python"
    free_port: int = SEVERAL_HOSTS_PORT
    hidden: bool = False
    """Whether the environment hides all accelerators of this machine."""
    devices_of: Sequence[int] = ()
    """Number of accelerators of each host of the job, if the hosts have reported it; empty: assume this machine's."""
    meeting_port: int = SEVERAL_HOSTS_PORT
    """Rendezvous port of a job on several hosts if the spec leaves it open. Once the first host has been asked, a port
    that is free there."""
    line: Sequence[str] = ()
    """The mtrain command that was typed here, word by word."""
    hosts: Sequence[str] = ()
    """Addresses of the hosts that the cluster has chosen; empty: those of the spec, or not known yet."""
    present: Sequence[int] = ()
    """Indices of the hosts that take part now, in the order of their ranks; empty: all hosts, in their own order."""
    address_of: Callable[[str], str] | None = None
    """Returns the IPv4 address of a host of the job, for launchers that take no names; None: addresses are not known
    yet, because no host has been asked."""

    @classmethod
    def here(cls, *, environ: Mapping[str, str], python: str, line: Sequence[str] = ()) -> "Machine":
        """Return the facts about this machine as a rank started with the environment ``environ`` would see them."""
        return cls(
            cores=placement.usable_cores(),
            devices=placement.count_devices(environ),
            addresses=placement.own_addresses(),
            python=python,
            free_port=placement.free_port(),
            hidden=placement.hides_devices(environ),
            line=tuple(line),
        )


def here(loaded: Loaded) -> Machine:
    """Return a description of this machine, as the ranks of a job will see it."""
    environ = environment.clean(environment.caller())
    return Machine.here(environ=environ, python=loaded.spec.backend.python or sys.executable, line=typed_line())


def typed_line() -> list[str]:
    """Return the running command as it would be typed on another host; for ``plan`` and ``--dry-run``, the planned one."""
    program = Path(sys.argv[0])
    start = [sys.executable, "-m", "mtrain"] if program.name == "__main__.py" else [program.name]
    words = sys.argv[1:]
    if words[:1] == ["plan"]:
        words = ["train", *(word for word in words[1:] if word != "--json")]
    return [*start, *(word for word in words if word.replace("_", "-") != "--dry-run")]
