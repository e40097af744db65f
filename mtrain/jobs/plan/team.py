"""Choose who takes part in a job: the hosts that are there, with ranks and devices, and the plugins that start them."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.core.interfaces import Backend, Cluster, Host, Launcher
from mtrain.jobs.plan import elastic, host_ranks, means
from mtrain.jobs.plan.machine import Machine
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain.system.devices import Devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The participants of a job, and how they are started."""

    spec: Spec
    """The spec, with the hosts that take part."""
    cluster: Cluster | None
    """The plugin that brings the job to its hosts; None: this host alone, or each is started by hand."""
    backend: Backend
    launcher_name: str
    launcher_class: type[Launcher]
    devices: Devices
    all_hosts: Sequence[Host]
    """All hosts of the job, with the numbers of ranks that they have when all are there."""
    hosts: Sequence[Host]
    """The hosts that take part, in the order of their ranks."""
    shards: int
    """Number of parts into which each micro batch of the job is divided."""

    @property
    def size(self) -> int:
        """Number of ranks on all hosts together."""
        return sum(host.slots for host in self.hosts)

    @property
    def ranks(self) -> int:
        """Largest number of ranks on one host."""
        return max(host.slots for host in self.hosts)

    def as_launcher_takes(self, chosen_hosts: Sequence[Host], machine: Machine) -> Sequence[Host]:
        """Return hosts with their names, or with their addresses where the launcher takes no names."""
        return chosen_hosts if self.launcher_class.takes_names else host_ranks.by_address(chosen_hosts, machine)


def team_of(loaded: Loaded, machine: Machine) -> Team:
    """Choose hosts, ranks, devices and plugins of the job of a loaded spec.

    Raises:
        SpecError: hosts, ranks and devices do not fit together.
        PluginError: backend, cluster or launcher is unknown, or they do not fit together.
    """
    job = loaded.job
    spec = host_ranks.with_hosts(loaded.spec, machine.hosts or means.host_names(job))
    backend = job.backend
    launcher_name, launcher_class = means.launcher_of(job)
    devices = host_ranks.devices_of(spec, machine, option=str(getattr(job.backend_options, "device", "auto")))
    devices.check()
    single = backend.rendezvous == "none" and loaded.origin("cluster.nproc_per_node").kind not in host_ranks.TYPED
    all_hosts = host_ranks.all_hosts(spec, machine, device=devices.option, single=single)
    elastic.check(spec, all_hosts)
    shards = spec.cluster.shards or sum(host.slots for host in all_hosts)
    present = host_ranks.present(spec, all_hosts, machine, shards=shards, on_cpu=devices.on_cpu)
    return Team(
        spec=host_ranks.with_hosts(spec, [host.address for host in present]) if machine.present else spec,
        cluster=job.cluster,
        backend=backend,
        launcher_name=launcher_name,
        launcher_class=launcher_class,
        devices=devices,
        all_hosts=all_hosts,
        hosts=present,
        shards=shards,
    )
