"""The hosts of a resumed job: this machine's place, addresses and ports are facts of one start, and are found anew.

A run folder on a shared disk may be resumed on another host, or in another allocation of a scheduler. What the run folder
says about the place of the host that wrote it would then be wrong.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mtrain.errors import UsageError
from mtrain.jobs.choices import HOSTS, PLACE, Chosen, value_at
from mtrain.jobs.host_ranks import TYPED
from mtrain.jobs.hosts import allocation
from mtrain.jobs.means import AUTO
from mtrain.spec.hostnames import few
from mtrain.spec.model import ClusterSpec
from mtrain.spec.yaml_reader import flow
from mtrain.system import environment, placement

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def stale_facts(chosen: Chosen, *, is_queued: bool = False) -> dict[str, Any]:
    """Return what the run says about the hosts of its start and does not hold for another one: dotted path -> value.

    Hosts hold where this machine is one of them, and where the cluster reaches them from any machine. ``is_queued``: a
    scheduler will choose the hosts.
    """
    keys = [*PLACE, *(() if not is_queued and _keeps_hosts(chosen) else HOSTS)]
    paths = [f"cluster.{key}" for key in keys]
    if "cluster.name" in chosen.found:
        paths.append("cluster.name")
    defaults = defaults_of(paths)
    values = {path: value_at(chosen.values, path) for path in paths}
    return {path: value for path, value in values.items() if value not in (None, defaults[path])}


def defaults_of(paths: Iterable[str]) -> dict[str, Any]:
    """Return the default of each path of the section ``cluster``."""
    section = {"cluster": ClusterSpec().model_dump(mode="json")}
    return {path: value_at(section, path) for path in paths}


def check(loaded: "Loaded", stale: Mapping[str, Any], *, shown: str, is_queued: bool = False) -> list[str]:
    """Return a sentence on facts that somebody typed for the run, that are not taken along, and that nothing replaces.

    Raises:
        UsageError: the run was on several hosts, this machine is none of them, and nobody says which hosts there are now.
    """
    ips = stale.get("cluster.ips") or []
    if len(ips) > 1 and not _says_hosts(loaded):
        raise UsageError(
            f"--resume {shown}: the run was on the hosts {few(ips)}, and this machine is none of them; name the hosts of "
            "now with --ips A,B, or go on with this one alone: --nnodes 1"
        )
    now = loaded.values
    left = {
        key: old for key, old in stale.items() if value_at(now, key) != old and loaded.origin(key).kind not in TYPED
    }
    if not left:
        return []
    named = ", ".join(f"{path} {flow(value)}" for path, value in left.items())
    # Where a scheduler chooses the hosts, nobody types them.
    is_chosen = is_queued or allocation.recognise(environment.caller(), registry=loaded.registry) is not None
    remedy = "they are found anew" if is_chosen else "type those that hold here"
    return [f"not taken from the run {shown}, as facts of its start: {named}; {remedy}"]


def _keeps_hosts(chosen: Chosen) -> bool:
    ips = value_at(chosen.values, "cluster.ips") or []
    if "cluster.ips" in chosen.found:
        return False
    return value_at(chosen.values, "cluster.name") != AUTO or any(placement.is_here(str(host)) for host in ips)


def _says_hosts(loaded: "Loaded") -> bool:
    cluster = loaded.spec.cluster
    if cluster.ips or cluster.name != AUTO or (cluster.nodes == 1 and loaded.origin("cluster.nodes").kind in TYPED):
        return True
    return allocation.recognise(environment.caller(), registry=loaded.registry) is not None
