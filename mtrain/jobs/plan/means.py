"""The cluster and the launcher of a job, chosen from the spec and the installed plugins."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain.core.interfaces import Launcher
from mtrain.core.plugin_classes import with_defaults
from mtrain.errors import PluginError, SpecError, UsageError
from mtrain.spec import terminal
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain.spec.resolved import AUTO, Resolved
from mtrain.system import names, placement
from mtrain.system.launch_options import LaunchOptions


def is_by_hand(spec: Spec) -> bool:
    """Return whether no cluster is chosen: a job on several hosts is then started by hand on each of them."""
    return spec.cluster.name == AUTO


def is_several(spec: Spec) -> bool:
    """Return whether a job runs on several hosts, or on another host than this one."""
    return len(spec.cluster.ips) > 1 or not is_by_hand(spec)


def joins(loaded: Loaded) -> bool:
    """Return whether this host serves another one that leads the job: it was started by hand and is not the first.

    Raises:
        UsageError: this machine is none of the hosts.
    """
    return is_several(loaded.spec) and is_by_hand(loaded.spec) and own_node(loaded) > 0


def own_node(loaded: Loaded, *, note: Callable[[str], None] = lambda text: terminal.say(text, err=True)) -> int:
    """Return this machine's index among the hosts, waiting for names that are not known yet, about which ``note`` is told.

    Raises:
        UsageError: it is none of them, or a name does not become known in the time that hosts have to join, or
            ``--node-rank`` is given without hosts.
    """
    cluster = loaded.spec.cluster
    if not cluster.ips:
        if cluster.node_rank:
            raise UsageError(
                f"--node-rank {cluster.node_rank}: no host is named; give all of them with --ips A,B or --hostfile"
            )
        return 0
    own = placement.own_addresses()
    if cluster.node_rank is not None:
        return placement.find_node_rank(cluster.ips, own, node_rank=cluster.node_rank)
    return names.find_node_rank(cluster.ips, own, timeout_s=cluster.joining_s, note=note)


def host_names(job: Resolved) -> Sequence[str]:
    """Return the addresses of a job's hosts, or the names of those that its cluster chooses when it starts.

    Raises:
        SpecError: no host is named, and the cluster does not choose them.
    """
    spec, cluster = job.spec, job.cluster
    if spec.cluster.ips or cluster is None:
        return spec.cluster.ips
    chosen = cluster.places(spec.cluster.nodes or 1)
    if not chosen:
        raise SpecError(
            f"cluster.name: {spec.cluster.name!r} given, but no host is named; give them with --ips A,B or --hostfile"
        )
    return chosen


def launcher_of(job: Resolved) -> tuple[str, type[Launcher]]:
    """Return name and class of the launcher that starts the ranks of a host.

    A launcher that the spec names is taken. Otherwise it is the first that provides what the backend needs: those of mtrain come
    before those of others, so that installing one changes no job, and those that are not ``automatic`` last.
    """
    spec, registry, rendezvous = job.spec, job.registry, job.backend.rendezvous
    requested_name = spec.launcher.name
    if requested_name != AUTO:
        requested = with_defaults(registry.load("launchers", requested_name), Launcher)
        if rendezvous not in requested.provides:
            raise SpecError(
                f"launcher.name: {requested_name!r} given, it provides {', '.join(sorted(requested.provides))}; "
                f"backend {spec.backend.name!r} needs {rendezvous!r}: use `auto`"
            )
        return requested_name, requested
    entries = registry.usable("launchers")
    names = [entry.name for entry in sorted(entries, key=lambda entry: not entry.is_own)]
    broken: list[str] = []
    # mtrain's own come first, so that installing a plugin changes no job; those that ask to be last are tried last.
    for automatic, name in itertools.product((True, False), names):
        try:
            launcher = with_defaults(registry.load("launchers", name), Launcher)
        except PluginError as error:  # A broken launcher that the user did not choose must not stop the job.
            broken.append(str(error))
            continue
        if rendezvous in launcher.provides and launcher.automatic == automatic:
            return name, launcher
    raise SpecError(
        "; ".join(
            [
                f"backend.name: {spec.backend.name!r} needs a launcher that provides {rendezvous!r}; "
                f"installed: {', '.join(names)}",
                *dict.fromkeys(broken),
            ]
        )
    )


def made_launcher(name: str, launcher_class: type[Launcher], facts: Mapping[str, Any], job: Resolved) -> Launcher:
    """Construct the launcher from the ``facts`` of the plan and its own options.

    Raises:
        SpecError: ``launcher.options`` has a key that the launcher does not know, or that the plan sets.
    """
    own_options = {**job.registry.defaults("launchers", name).options, **job.spec.launcher.options}
    # A launcher with another address or port than the plan's would start ranks that never meet.
    reserved = sorted(own_options.keys() & LaunchOptions.model_fields.keys())
    if reserved:
        raise SpecError(
            f"launcher.options.{reserved[0]}: mtrain sets it, from the section `cluster` and the machine; leave it out"
        )
    options = job.registry.options("launchers", name, {**own_options, **facts}, path="launcher.options")
    launcher: Launcher = job.registry.construct("launchers", name, launcher_class, options)
    return launcher
