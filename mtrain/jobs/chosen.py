"""The cluster and the launcher of a job, chosen from the spec and the installed plugins."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.core.interfaces import Cluster, Launcher
from mtrain.core.plugin_classes import with_defaults
from mtrain.errors import PluginError, SpecError
from mtrain.spec import former_keys, plugins
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain.system.placement import LaunchOptions

AUTO = "auto"
"""Value of ``cluster.name`` and ``launcher.name`` that leaves the choice to mtrain."""


def cluster_of(spec: Spec, policy: plugins.Policy) -> Cluster | None:
    """Return the plugin that brings the job to its hosts; None: this host alone, or each is started by hand."""
    if spec.cluster.name == AUTO:
        return None
    cluster = made_cluster(spec.cluster.name, former_keys.cluster_options(spec), policy=policy)
    names_of(spec, cluster)
    return cluster


def made_cluster(name: str, raw_options: Mapping[str, Any], *, policy: plugins.Policy | None = None) -> Cluster:
    """Make the cluster plugin ``name``.

    Raises:
        PluginError: there is none of that name.
        SpecError: an option is wrong.
    """
    options = plugins.options("clusters", name, raw_options, path="cluster.options", policy=policy)
    cluster: Cluster = plugins.made("clusters", name, options, policy=policy)
    return cluster


def host_names(loaded: Loaded) -> Sequence[str]:
    """Return the addresses of a job's hosts, or the names of those that its cluster chooses when it starts.

    Raises:
        SpecError: no host is named, and the cluster does not choose them.
    """
    return names_of(loaded.spec, cluster_of(loaded.spec, loaded.policy))


def names_of(spec: Spec, cluster: Cluster | None) -> Sequence[str]:
    """Return the addresses of the hosts that the spec names, or the names of those that the cluster chooses."""
    if spec.cluster.ips or cluster is None:
        return spec.cluster.ips
    names = cluster.places(spec.cluster.nodes or 1)
    if not names:
        raise SpecError(
            f"cluster.name: {spec.cluster.name!r} given, but no host is named; give them with --ips A,B or --hostfile"
        )
    return names


def launcher_for(rendezvous: str, spec: Spec, policy: plugins.Policy) -> tuple[str, type[Launcher]]:
    """Return name and class of the launcher for a backend that needs ``rendezvous``.

    A launcher that the spec names is taken. Otherwise it is the first that provides ``rendezvous``: those of mtrain come
    before those of others, so that installing one changes no job, and those that are not ``automatic`` last.
    """
    requested_name = spec.launcher.name
    if requested_name != AUTO:
        requested = with_defaults(plugins.load("launchers", requested_name, policy=policy), Launcher)
        if rendezvous not in requested.provides:
            raise SpecError(
                f"launcher.name: {requested_name!r} given, it provides {', '.join(sorted(requested.provides))}; "
                f"backend {spec.backend.name!r} needs {rendezvous!r}: use `auto`"
            )
        return requested_name, requested
    entries = [entry for entry in plugins.names("launchers", policy=policy) if entry.enabled]
    names = [entry.name for entry in sorted(entries, key=lambda entry: entry.distribution != "mtrain")]
    broken: list[str] = []
    for automatic, name in itertools.product((True, False), names):
        try:
            launcher = with_defaults(plugins.load("launchers", name, policy=policy), Launcher)
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


def made_launcher(name: str, launcher_class: type[Launcher], facts: Mapping[str, Any], loaded: Loaded) -> Launcher:
    """Construct the launcher from the ``facts`` of the plan and its own options.

    Raises:
        SpecError: ``launcher.options`` has a key that the launcher does not know, or that the plan sets.
    """
    own_options = {**loaded.policy.of("launchers", name).options, **loaded.spec.launcher.options}
    reserved = sorted(own_options.keys() & LaunchOptions.model_fields.keys())
    if reserved:
        raise SpecError(
            f"launcher.options.{reserved[0]}: mtrain sets it, from the section `cluster` and the machine; leave it out"
        )
    options = plugins.options(
        "launchers", name, {**own_options, **facts}, path="launcher.options", policy=loaded.policy
    )
    launcher: Launcher = plugins.construct("launchers", name, launcher_class, options)
    return launcher
