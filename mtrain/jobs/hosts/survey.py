"""The facts about the hosts of a job from which its leader makes the plan for all of them."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.jobs.hosts import late_names
from mtrain.jobs.hosts.channel import Message
from mtrain.jobs.plan.machine import Machine


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
            return late_names.address_of(host, self.hellos[node], interface=interface)

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

    @property
    def free_bytes(self) -> list[int]:
        """Return the free memory of each host."""
        return [int(hello["free_bytes"]) for hello in self.hellos]
