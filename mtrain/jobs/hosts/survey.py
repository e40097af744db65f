"""The facts about the hosts of a job from which its leader makes the plan for all of them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.errors import UsageError
from mtrain.jobs.hosts.channel import Message
from mtrain.jobs.plan.machine import Machine
from mtrain.system import placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What the hosts of a job have told the leader."""

    hellos: Sequence[Message]
    """The hello of each host, in the order of the list of hosts."""
    port: int
    """A port that is free on the first host, where the ranks can meet."""
    addresses: Sequence[str]
    """The address of each host. A cluster that chooses the hosts itself may give a lost one another address."""
    present: Sequence[int] = ()
    """Indices of the hosts that take part, in the order of their ranks; empty: all of them in their own order."""
    missing: frozenset[int] = frozenset()
    """Indices of the hosts that are not there, whose facts are those of another."""

    def machine(self, here: Machine, *, interface: str | None) -> Machine:
        """Return the facts of a plan for all hosts; ``here``: the leader's own, ``interface``: ``cluster.interface``."""
        hosts = list(self.addresses)

        @functools.cache  # A plan asks several times, and each answer may be a question to the name service.
        def address_of(host: str) -> str:
            node = hosts.index(host) if host in hosts else 0  # cluster.master_addr may be another name of the first
            if node in self.missing:  # What it has for addresses is not known, and no rank will use them.
                return host
            return address_that_others_use(host, self.hellos[node], interface=interface)

        return dataclasses.replace(
            here,
            cores=min(int(hello["cores"]) for hello in self.hellos),
            devices=int(self.hellos[0]["devices"]),
            devices_of=[int(hello["devices"]) for hello in self.hellos],
            hidden=bool(self.hellos[0]["hidden"]),
            meeting_port=self.port,
            hosts=self.addresses,
            present=self.present,
            address_of=address_of,
        )


def address_that_others_use(host: str, hello: Mapping[str, Any], *, interface: str | None = None) -> str:
    """Return the IPv4 address of a host, for launchers that take no names. The others receive the same.

    An address that the host itself has reported in its ``hello`` counts: the one that its name means here, else that of
    ``interface``, else the only one.

    Raises:
        UsageError: it is not known which address of the host the others can use.
    """
    own: dict[str, str] = {
        address: name
        for name, address in hello["addresses"]
        if ":" not in address and not placement.is_loopback(address) and not placement.is_link_local(address)
    }
    known: list[str] = placement.resolve(host)
    chosen: list[str] = [
        *(address for address in known if address in own),
        *(address for address, name in own.items() if name == interface),
        *(own if len(own) == 1 else ()),
    ]
    if chosen:
        return chosen[0]
    means = f"means {', '.join(known)} here" if known else "has no address here"
    listed = ", ".join(f"{address} ({name})" for address, name in own.items()) or "none that other hosts can use"
    raise UsageError(
        f"cluster.ips: the launcher of this backend needs the address of {host}, whose name {means}; its own addresses "
        f"are {listed}: give one of them in place of the name, or correct /etc/hosts"
    )
