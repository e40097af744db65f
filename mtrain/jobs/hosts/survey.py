"""What a leader learns from its hosts before it plans: names that they know late, addresses, and the facts about each."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.errors import UsageError
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.preflight.partners import EVERYBODY, partners
from mtrain.system import names, placement

ASK_S = 20.0
"""Seconds that an agent may take to look up names once."""
MOST_NOTED = 3
"""Most hosts whose missing names are told."""
AGAIN_S = 0.5
"""Seconds between two questions."""


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
    # A name of the host's own often means 127.0.1.1 there, and a link-local address needs an interface to be of use.
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


def await_names(
    members: Mapping[int, Member],
    wanted: Sequence[str],
    *,
    timeout_s: float,
    note: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Wait until every host in ``members`` knows the names among ``wanted``, or ``timeout_s`` seconds have passed.

    Names that stay unknown are findings of the preflight. ``note`` receives a sentence on what is missing after a few
    seconds; ``stop`` ends the waiting by returning True.
    """
    hosts = _names_for(members, [host for host in wanted if not placement.is_address(host)])
    began, told = time.monotonic(), False
    while any(hosts.values()) and not stop():
        missing = _missing(members, hosts, stop=stop)
        waited = time.monotonic() - began
        if not missing or waited > timeout_s:
            return
        if waited > names.NOTE_S and not told:
            told = True
            waits = [f"waiting until {names.in_words(each)} known on {label}" for label, each in missing.items()]
            more = [f"and {len(waits) - MOST_NOTED:,} other hosts wait for names"] if len(waits) > MOST_NOTED else []
            note("; ".join([*waits[:MOST_NOTED], *more]))
        time.sleep(AGAIN_S)


def _names_for(members: Mapping[int, Member], wanted: Sequence[str]) -> dict[int, list[str]]:
    """Return the names that each host must know: of a few hosts all ``wanted``, of many those of its partners."""
    # Ranks of many hosts connect to the first one and to their neighbours; all names at all hosts would be the square of
    # their number.
    if len(members) <= EVERYBODY:
        return {node: list(wanted) for node in members}
    hosts = [member.host for member in members.values()]
    named, others = set(wanted), sorted(set(wanted) - set(hosts))
    return {
        node: [hosts[each] for each in (place, *partners(place, len(hosts))) if hosts[each] in named] + others
        for place, node in enumerate(members)
    }


def _missing(
    members: Mapping[int, Member], hosts: Mapping[int, Sequence[str]], *, stop: Callable[[], bool]
) -> dict[str, list[str]]:
    """Return the names that a host does not know, by its label; a host that does not answer is left out."""
    channels = [member.channel for member in members.values()]
    each_asked = [{"hosts": list(hosts[node])} for node in members]
    answers = ask_all(channels, "resolve", timeout_s=ASK_S, stop=stop, each=each_asked)
    unknown = {
        member.label: [host for host, addresses in answer.get("addresses", {}).items() if not addresses]
        for member, answer in zip(members.values(), answers, strict=True)
    }
    return {label: each for label, each in unknown.items() if each}
