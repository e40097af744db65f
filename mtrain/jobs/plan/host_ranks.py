"""The hosts of a job, with their ranks and devices."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mtrain.core.interfaces import Host
from mtrain.errors import SpecError
from mtrain.jobs.plan import elastic
from mtrain.jobs.plan.machine import Machine
from mtrain.spec.hostnames import bracket_host, few
from mtrain.spec.model import Spec
from mtrain.system import placement
from mtrain.system.devices import Devices
from mtrain.system.placement import LOOPBACK

TYPED = ("flag", "override")
"""Origins of values from the command line. Such a value is obeyed or refused, never ignored.

In contrast, a backend that trains in one process ignores the number of ranks in a spec file, so that it can run the
same spec."""


def present(spec: Spec, hosts: Sequence[Host], machine: Machine, *, shards: int, on_cpu: bool) -> Sequence[Host]:
    """Return the hosts that take part, with their numbers of ranks."""
    chosen = list(machine.present) or list(range(len(hosts)))
    if elastic.has_rank_per_shard(spec, on_cpu=on_cpu):
        return elastic.spread(hosts, chosen, shards=shards)
    return [hosts[node] for node in chosen]


def by_address(hosts: Sequence[Host], machine: Machine) -> list[Host]:
    """Return the hosts with their addresses in place of names, as far as these are known."""
    alone = len(hosts) == 1
    return [dataclasses.replace(host, address=address_of(host.address, machine, alone=alone)) for host in hosts]


def address_of(host: str, machine: Machine, *, alone: bool) -> str:
    """Return the address of a host, or its name where it is not known yet."""
    if placement.is_address(host):
        return host
    if machine.address_of is not None:
        return machine.address_of(host)
    return LOOPBACK if alone else host


def with_hosts(spec: Spec, hosts: Sequence[str]) -> Spec:
    """Return the spec with the hosts of the job, which it need not name itself."""
    if list(hosts) == spec.cluster.ips:
        return spec
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"ips": list(hosts)})})


def all_hosts(spec: Spec, machine: Machine, *, device: str, single: bool) -> list[Host]:
    """Return the hosts of the job with their numbers of ranks; ``single``: the backend trains in one process."""
    # Of a host named twice, nothing could tell which of the two an agent there is.
    cluster = spec.cluster
    addresses = cluster.ips or [LOOPBACK]
    repeated = sorted(address for address, times in Counter(addresses).items() if times > 1)
    if repeated:
        raise SpecError(
            f"cluster.ips: {few(repeated)} given twice; name each host once, with its ranks: {bracket_host(repeated[0])}:2"
        )
    if cluster.slots is not None and len(cluster.slots) != len(cluster.ips):
        raise SpecError(
            f"cluster.slots: {len(cluster.slots)} numbers given for {len(cluster.ips)} hosts; "
            "give one for each of cluster.ips"
        )
    if single:
        return [Host(address=address) for address in addresses]
    if cluster.slots is not None:
        return [Host(address=address, slots=slots) for address, slots in zip(addresses, cluster.slots, strict=True)]
    device_counts = machine.devices_of or [machine.devices] * len(addresses)
    return [
        Host(address=address, slots=_ranks_of(spec, count, device=device))
        for address, count in zip(addresses, device_counts, strict=True)
    ]


def _ranks_of(spec: Spec, device_count: int, *, device: str) -> int:
    """Return the number of ranks on a host with ``device_count`` accelerators: ``cluster.nproc_per_node``.

    ``auto`` means one rank per device that the job may use, and one rank on the CPU.
    """
    ranks = spec.cluster.nproc_per_node
    usable = 0 if device == "cpu" else device_count
    chosen = spec.cluster.devices
    if ranks == "auto":
        return max(1, len(chosen) if chosen is not None else usable)
    if chosen is not None and ranks > len(chosen) > 0 and usable:
        raise SpecError(
            f"cluster.nproc_per_node: {ranks} ranks given for {len(chosen)} devices ({chosen}); "
            "give as many devices, or fewer ranks"
        )
    return ranks


def devices_of(spec: Spec, machine: Machine, *, option: str) -> Devices:
    """Return the devices that the job may use, of this machine and of the hosts that have reported theirs."""
    ips, own = spec.cluster.ips, {address for _, address in machine.addresses}
    here = not ips or (len(ips) == 1 and ips[0] in own)
    device_counts = machine.devices_of or ([machine.devices] if here else None)
    return Devices(option=option, numbers=spec.cluster.devices, present=device_counts, hidden=machine.hidden)
