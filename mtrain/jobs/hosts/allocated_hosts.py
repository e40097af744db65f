"""Give a spec the hosts of the scheduler's allocation in which this process runs, so that nobody has to type them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces.allocation import Allocation
from mtrain.errors import SpecError, UsageError
from mtrain.jobs.hosts import allocation as allocations
from mtrain.jobs.plan.host_ranks import TYPED
from mtrain.jobs.plan.means import host_names
from mtrain.spec import config
from mtrain.spec.hostnames import few
from mtrain.spec.provenance import Origin
from mtrain.spec.resolved import AUTO
from mtrain.system import environment

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

NODES = "cluster.nodes"


def complete(loaded: "Loaded", environ: Mapping[str, str] | None = None) -> "Loaded":
    """Return ``loaded`` with hosts, own place and cluster from the allocation in which this process runs.

    A spec that names hosts keeps them. ``--nnodes 1`` states that a job of this process alone is intended.
    ``environ``: environment variables; None: those of the process.

    Raises:
        UsageError: there is an allocation of several processes or hosts from which a job on all of them does not
            follow, and starting one here would start several, or leave hosts idle; or its hosts are not as many as the
            spec wants.
    """
    environ = environment.caller() if environ is None else environ
    cluster = loaded.spec.cluster
    if not cluster.ips and cluster.nodes == 1 and loaded.origin(NODES).kind in TYPED:
        return loaded
    allocation = allocations.recognise(environ, registry=loaded.registry)
    if allocation is None:
        if not cluster.ips:
            allocations.refuse_unread(environ, registry=loaded.registry)
            # What was typed is obeyed or refused, never ignored.
            if cluster.nodes not in (None, 1) and loaded.origin(NODES).kind in TYPED and cluster.name == AUTO:
                raise UsageError(f"{_with_origin(loaded, NODES)}: no host is named; give --ips HOST,HOST")
        return loaded
    if cluster.ips:
        return _with_place(loaded, allocation)
    # A cluster such as ray knows the nodes of the allocation better than the allocation's variables do.
    if not allocation.copies and _chooses_hosts(loaded):
        return loaded
    names = allocations.host_names(allocation, environ) if _is_usable(loaded, allocation) else []
    if not names:
        raise UsageError(_refusal(loaded, allocation))
    if cluster.nodes not in (None, len(names)):
        raise UsageError(
            f"{_with_origin(loaded, NODES)}: {cluster.nodes} hosts wanted, but {allocation.scheduler} has given this job "
            f"{len(names)} ({allocation.evidence}); give {len(names)}, or name the hosts with --ips"
        )
    return _with_hosts(loaded, allocation, names)


def complete_if_possible(loaded: "Loaded") -> "Loaded":
    """Return what ``complete`` returns, or ``loaded`` itself where that refuses: for commands that start nothing."""
    try:
        return complete(loaded)
    except UsageError:
        return loaded


def _refusal(loaded: "Loaded", allocation: Allocation) -> str:
    """Return why no job on all hosts of the allocation can be started, and what to type instead."""
    name = loaded.spec.cluster.name
    if name != AUTO and allocation.copies and _one_each(allocation):
        return (
            f"{_with_origin(loaded, 'cluster.name')}: {name!r} brings a job to its hosts from one of them, but "
            f"{allocation.scheduler} starts this command on each ({allocation.evidence}); give --cluster auto, or start "
            "it once"
        )
    return allocations.contradiction(allocation)


def _with_origin(loaded: "Loaded", path: str) -> str:
    """Return a value with the place where it was set, for a message."""
    origin = loaded.origin(path)
    return str(origin) if origin.kind in TYPED else f"{origin} {path}"


def _is_usable(loaded: "Loaded", allocation: Allocation) -> bool:
    """Return whether a job on all hosts follows from the allocation, if it names them."""
    name = loaded.spec.cluster.name
    if allocation.cluster:
        present = {entry.name for entry in loaded.registry.usable("clusters")}
        return name in (AUTO, allocation.cluster) and allocation.cluster in present
    return name == AUTO and _one_each(allocation)


def _chooses_hosts(loaded: "Loaded") -> bool:
    """Return whether the cluster of the spec chooses the hosts itself, as one does that runs inside the allocation."""
    try:
        return bool(host_names(loaded.job))
    except SpecError:
        return False


def _one_each(allocation: Allocation) -> bool:
    """Return whether the scheduler starts one process on each host, which knows its place."""
    return allocation.processes_per_host == 1 and allocation.place is not None


def _with_place(loaded: "Loaded", allocation: Allocation) -> "Loaded":
    """Return ``loaded``, whose spec names hosts, with this host's place where the scheduler tells nothing else."""
    # A scheduler that knows the hosts may have them in another order.
    cluster, place = loaded.spec.cluster, allocation.place
    if allocation.hosts is not None or not _one_each(allocation):
        return loaded
    if cluster.name != AUTO or cluster.node_rank is not None or len(cluster.ips) < 2:
        return loaded
    return _change(loaded, allocation, {"node_rank": ("place", place)})


def _with_hosts(loaded: "Loaded", allocation: Allocation, names: Sequence[str]) -> "Loaded":
    cluster = loaded.spec.cluster
    # Without a cluster, the scheduler itself starts this command on each host, as people would by hand.
    by_hand = not allocation.cluster
    values: dict[str, tuple[str, Any]] = {"ips": ("host_names", list(names))}
    if allocation.cluster:
        values["name"] = ("cluster", allocation.cluster)
    if by_hand and cluster.node_rank is None:
        values["node_rank"] = ("place", allocation.place)
    if by_hand and cluster.control_port == AUTO and allocation.port not in (None, cluster.master_port):
        values["control_port"] = ("port", allocation.port)
    if allocation.interface and cluster.interface is None:
        values["interface"] = ("interface", allocation.interface)
    if allocation.ranks_per_host and cluster.nproc_per_node == AUTO and cluster.slots is None:
        values["nproc_per_node"] = ("ranks_per_host", allocation.ranks_per_host)
    return _change(loaded, allocation, values, _note(allocation, names, values))


def _change(loaded: "Loaded", allocation: Allocation, values: Mapping[str, tuple[str, Any]], *notes: str) -> "Loaded":
    """Return ``loaded`` with ``values``: key of the section ``cluster`` -> (field of the allocation, value)."""
    return config.with_values(
        loaded,
        {
            f"cluster.{key}": (value, Origin("environment", text=f"{allocation.scheduler} ({allocation.source(name)})"))
            for key, (name, value) in values.items()
        },
        notes=notes,
    )


def _note(allocation: Allocation, names: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return what was taken from the allocation, in one sentence."""
    parts = [f"hosts: {few(names)}, from {allocation.scheduler} ({allocation.source('host_names')})"]
    if "node_rank" in values:
        parts.append(f"this is host {allocation.place} ({allocation.source('place')})")
    if "nproc_per_node" in values:
        parts.append(f"{allocation.ranks_per_host} ranks on each ({allocation.source('ranks_per_host')})")
    if "interface" in values:
        parts.append(f"interface {allocation.interface} ({allocation.source('interface')})")
    return "; ".join(parts)
