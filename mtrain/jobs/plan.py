"""The plan of a job: the exact command for every host, and the numbers that follow from the spec.

``mtrain plan`` prints a plan, ``mtrain train`` runs it. Nothing here imports a framework or starts a process.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Backend, Cluster, Command, Host, HostedJob, Launcher, Recipe
from mtrain.core.plugin_classes import with_defaults
from mtrain.core.recipe import make_recipe, rounds, scaling
from mtrain.core.schedule import total_updates
from mtrain.errors import PluginError, SpecError
from mtrain.jobs import elastic
from mtrain.jobs.metrics_place import MetricsPlace
from mtrain.jobs.own_code import files_of, own_code_of
from mtrain.spec import former_keys, plugins
from mtrain.spec.config import Loaded
from mtrain.spec.model import ClusterSpec, Spec
from mtrain.system import placement
from mtrain.system.devices import Devices
from mtrain.system.placement import LOOPBACK, LaunchOptions

AUTO = "auto"
"""Value of ``cluster.name`` and ``launcher.name`` that leaves the choice to mtrain."""
AGENT = ("-m", "mtrain.cluster.agent")
"""Arguments of the interpreter that runs an agent."""
SEVERAL_HOSTS_PORT = 29500
"""Default rendezvous port of a job on several hosts: a fixed one, which every host knows without asking the others."""
TYPED = ("flag", "override")
"""Origins of values from the command line. Such a value is obeyed or refused, never ignored.

In contrast, a backend that trains in one process ignores the number of ranks in a spec file, so that it can run the
same spec."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every process that a job starts: on which host, with which command and environment."""

    title: str
    source: str
    run_dir: Path
    resume: Path | None
    backend: str
    launcher_name: str
    launcher: Launcher = field(repr=False, compare=False)
    """The plugin that starts the ranks of each host."""
    hosts: Sequence[Host]
    commands: Sequence[Command]
    """One per host, in the order of ``hosts``."""
    cluster_name: str = ""
    """Name of the plugin that brings the commands to the hosts; empty: each command is started on its own host."""
    cluster: Cluster | None = field(default=None, repr=False, compare=False)
    """That plugin."""
    hosted_job: HostedJob | None = None
    """The facts that the plugin receives."""
    brought: Sequence[Sequence[str]] = ()
    """With a cluster: the command it runs for each host, or the one that people type there."""
    max_restarts: int
    log_dir: Path | None
    files: Mapping[str, str] = field(default_factory=dict)
    """Files besides those of the spec that every host needs, equal on all: what each is -> path."""
    numbers: Mapping[str, Any]
    """Values derived from the spec (global batch, micro batch, rates ...), by name, in the order of printing."""
    metrics: MetricsPlace | None = None
    """Where each host answers Prometheus; None: nowhere."""

    @property
    def size(self) -> int:
        """Number of ranks on all hosts together."""
        return sum(host.slots for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Return the lowest rank number on host number ``node``."""
        return sum(host.slots for host in self.hosts[:node])

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values that JSON can hold."""
        return {
            "source": self.source,
            "run_dir": str(self.run_dir),
            "resume": str(self.resume) if self.resume else None,
            "backend": self.backend,
            "launcher": self.launcher_name,
            "cluster": self.cluster_name,
            "carrier": self.cluster_name,  # its former name
            "brought": [list(argv) for argv in self.brought],
            "max_restarts": self.max_restarts,
            "numbers": dict(self.numbers),
            "commands": [{"host": c.host, "argv": list(c.argv), "env": dict(c.env)} for c in self.commands],
        }

    def text(self) -> str:
        """Return the plan as text for a person. Its commands can be pasted into a shell."""
        head = {"spec": self.source, "run folder": str(self.run_dir), "resumes from": str(self.resume or "")}
        way = f" on each host, brought there by {self.cluster_name}" if self.cluster_name else ""
        head |= {"backend": f"{self.backend}, started by {self.launcher_name}{way}"}
        head |= {name.replace("_", " "): str(value) for name, value in self.numbers.items()}
        width = max(map(len, head)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in head.items() if value]
        for rank, command in enumerate(self.commands):
            lines += ["", f"host {rank}: {command.host}"]
            if self.cluster is not None:
                lines += [
                    "  " + shlex.join(self.brought[rank]),
                    "  which there starts" if self.cluster.starts else "  which starts",
                ]
            lines += _shell(command)
        return "\n".join(lines) + "\n"


def _shell(command: Command) -> list[str]:
    """Return the command as lines for a shell: variables first, quoted where needed. For printing only."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items())]
    return ["  " + " ".join(variables) + " \\", "  " + shlex.join(command.argv)]


def title_of(loaded: Loaded, *, name: str) -> str:
    """Return the title of a job's display; ``name``: the name of the run."""
    subject = loaded.spec.model.name if loaded.script is None else loaded.script.path.name
    return f"{name}: {subject} on {loaded.spec.backend.name}"


def make_plan(loaded: Loaded, *, run_dir: Path, resume: Path | None, machine: Machine, mode: str = "train") -> Plan:
    """Make the plan of a loaded spec on ``machine``.

    ``mode`` is the task of the ranks, such as "train" or "evaluate"; where there is a script, they run the script.

    Raises:
        SpecError: hosts, ranks and batch do not fit together, or the backend cannot follow the recipe.
        PluginError: backend or launcher is unknown, or they do not fit together.
    """
    policy = loaded.policy
    cluster = _cluster(loaded.spec, policy)
    spec = _with_hosts(loaded.spec, machine.hosts or _names(loaded.spec, cluster))
    raw_options = spec.backend.options
    options = plugins.options("backends", spec.backend.name, raw_options, path="backend.options", policy=policy)
    backend: Backend = plugins.made("backends", spec.backend.name, options, policy=policy)
    launcher_name, launcher_class = _launcher_for(backend.rendezvous, spec, policy)
    devices = _devices(spec, machine, option=str(getattr(options, "device", "auto")))
    devices.check()
    single = backend.rendezvous == "none" and loaded.origin("cluster.nproc_per_node").kind not in TYPED
    all_hosts = _hosts(spec, machine, device=devices.option, single=single)
    elastic.check(spec, all_hosts)
    shards = spec.cluster.shards or sum(host.slots for host in all_hosts)
    hosts = _present(spec, all_hosts, machine, shards=shards, on_cpu=devices.on_cpu)
    if machine.present:
        spec = _with_hosts(spec, [host.address for host in hosts])
    ranks = max(host.slots for host in hosts)
    size = sum(host.slots for host in hosts)
    own_code = own_code_of(loaded, framework=backend.framework)
    recipe = make_recipe(spec if loaded.script is None else _sized_for(spec, size), size=size)
    if loaded.script is not None and recipe.shards not in (None, size):
        raise SpecError(
            f"cluster.shards: {recipe.shards} given for {size} ranks of a script, whose own loop decides what a rank computes; "
            "leave it out, or give cluster.sharing=ranks"
        )
    if loaded.script is not None and spec.train.prune is not None:
        raise SpecError("train.prune: given for a script, whose own loop decides the updates; leave it out")
    if mode in ("train", "compare") and loaded.script is None:
        spans_ranks = recipe.shards is not None and plugins.load("models", spec.model.name, policy=policy).spans_ranks
        elastic.check_passes(recipe, size=size, model=spec.model.name, spans_ranks=spans_ranks)
        total_updates(spec, 1)  # The result is not used: this raises if the spec sets no length.
    backend.check(recipe, size=size, on_cpu=devices.on_cpu)
    python = _python_on_hosts(spec, cluster, machine)
    facts = _launch_options(spec, machine, python=python, ranks=ranks, devices=devices.visible)
    launched = hosts if launcher_class.takes_names else _by_address(hosts, machine)
    if not launcher_class.takes_names:
        facts["master_addr"] = _address(facts["master_addr"], machine, alone=len(hosts) == 1)
    launcher = _launcher(launcher_name, launcher_class, facts, loaded)
    mode = mode if loaded.script is None else "script"
    resumed = ["--resume", str(resume)] if resume else []
    chosen_mode = ["--mode", mode] if mode != "train" else []
    argv = ["-m", "mtrain.rank.worker", "--run-dir", str(run_dir), *chosen_mode, *resumed, *_script_words(loaded)]
    commands = [
        _placed(dataclasses.replace(command, host=host.address), hosts, spec.cluster, machine)
        for command, host in zip(launcher.plan(argv, launched, ranks), hosts, strict=True)
    ]
    if elastic.is_elastic(spec) and elastic.sharing(spec, on_cpu=devices.on_cpu) == elastic.RANKS:
        elastic.check_every_number(
            all_hosts if launcher_class.takes_names else _by_address(all_hosts, machine),
            fewest=spec.cluster.min_nodes or 1,
            shards=shards,
            plan=lambda each: launcher.plan(argv, each, max(host.slots for host in each)),
        )
    hosted_job = None if cluster is None else _hosted_job(spec, hosts, machine, python=python)
    metrics = MetricsPlace.of(spec, mode)
    return Plan(
        title=title_of(loaded, name=run_dir.name),
        source=str(loaded.source),
        run_dir=run_dir,
        resume=resume,
        backend=spec.backend.name,
        launcher_name=launcher_name,
        launcher=launcher,
        hosts=hosts,
        commands=commands,
        cluster_name="" if cluster is None else spec.cluster.name,
        cluster=cluster,
        hosted_job=hosted_job,
        brought=_brought(cluster, hosted_job),
        max_restarts=spec.cluster.max_restarts,
        log_dir=Path(spec.cluster.log_dir).absolute() if spec.cluster.log_dir else None,
        files=files_of(loaded, own_code),
        numbers={key: reference.words for key, reference in own_code.items()}
        | (
            _numbers(spec, recipe, hosts=hosts, threads=facts["threads"], on_cpu=devices.on_cpu)
            if loaded.script is None
            else _script_numbers(loaded, hosts=hosts, threads=facts["threads"], on_cpu=devices.on_cpu)
        )
        | {"devices": devices.words()}
        | _batchnorm_row(recipe, size=size, on_cpu=devices.on_cpu)
        | (_names_to_come(launcher_name, launched) if not launcher_class.takes_names else {})
        | ({} if metrics is None else {"metrics": f"{metrics.url()} on each host"}),
        metrics=metrics,
    )


def _present(spec: Spec, hosts: Sequence[Host], machine: Machine, *, shards: int, on_cpu: bool) -> Sequence[Host]:
    """Return the hosts that take part, with their numbers of ranks."""
    chosen = list(machine.present) or list(range(len(hosts)))
    if elastic.is_elastic(spec) and elastic.sharing(spec, on_cpu=on_cpu) == elastic.RANKS:
        return elastic.spread(hosts, chosen, shards=shards)
    return [hosts[node] for node in chosen]


def _by_address(hosts: Sequence[Host], machine: Machine) -> list[Host]:
    """Return the hosts with their addresses in place of names, as far as these are known."""
    alone = len(hosts) == 1
    return [dataclasses.replace(host, address=_address(host.address, machine, alone=alone)) for host in hosts]


def _address(host: str, machine: Machine, *, alone: bool) -> str:
    """Return the address of a host, or its name where it is not known yet."""
    if placement.is_address(host):
        return host
    if machine.address_of is not None:
        return machine.address_of(host)
    return LOOPBACK if alone else host


def _names_to_come(launcher: str, hosts: Sequence[Host]) -> dict[str, str]:
    """Return a remark on hosts whose names the commands still hold."""
    names = [host.address for host in hosts if not placement.is_address(host.address)]
    return (
        {"names": f"{launcher} takes addresses: {', '.join(names)} become theirs when hosts are asked"} if names else {}
    )


def _script_words(loaded: Loaded) -> list[str]:
    """Return the arguments of a rank that name the user's script; none for other jobs."""
    script = loaded.script
    if script is None:
        return []
    outside_paths = ["--outside-paths", ",".join(script.outside_paths)] if script.outside_paths else []
    trial = [] if script.trial is None else ["--trial", script.trial.text()]
    return ["--script-digest", script.digest, *outside_paths, *trial, "--", str(script.path), *script.arguments]


def _sized_for(spec: Spec, size: int) -> Spec:
    """Return the spec with a batch that divides among ``size`` ranks: a script names its own batch when it runs."""
    train = spec.train.model_copy(update={"batch_size": size, "accumulate": 1})
    return spec.model_copy(update={"train": train})


def _script_numbers(loaded: Loaded, *, hosts: Sequence[Host], threads: int, on_cpu: bool) -> dict[str, Any]:
    """Return the values of a script's job that are known before the script runs."""
    assert loaded.script is not None
    slots = [host.slots for host in hosts]
    each = f" x {slots[0]}" if len(set(slots)) == 1 else ": " + " + ".join(map(str, slots))
    return {
        "script": " ".join([str(loaded.script.path), *map(shlex.quote, loaded.script.arguments)]),
        "ranks": f"{sum(slots)} ({len(hosts)} host{'s' if len(hosts) > 1 else ''}{each})",
        "precision": _precision_row(loaded.spec, on_cpu=on_cpu),
        "set_outside": ", ".join(loaded.script.outside_paths)
        or "nothing: optimizer, schedule and batch are the script's",
        "threads": f"{threads} per rank",
    }


def _cluster(spec: Spec, policy: plugins.Policy) -> Cluster | None:
    """Return the plugin that brings the job to its hosts; None: this host alone, or each is started by hand."""
    if spec.cluster.name == AUTO:
        return None
    cluster = made_cluster(spec.cluster.name, former_keys.cluster_options(spec), policy=policy)
    _names(spec, cluster)
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
    return _names(loaded.spec, _cluster(loaded.spec, loaded.policy))


def _names(spec: Spec, cluster: Cluster | None) -> Sequence[str]:
    """See ``host_names``."""
    if spec.cluster.ips or cluster is None:
        return spec.cluster.ips
    names = cluster.places(spec.cluster.nodes or 1)
    if not names:
        raise SpecError(
            f"cluster.name: {spec.cluster.name!r} given, but no host is named; give them with --ips A,B or --hostfile"
        )
    return names


def _with_hosts(spec: Spec, hosts: Sequence[str]) -> Spec:
    """Return the spec with the hosts of the job, which it need not name itself."""
    if list(hosts) == spec.cluster.ips:
        return spec
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"ips": list(hosts)})})


def _brought(cluster: Cluster | None, job: HostedJob | None) -> list[Sequence[str]]:
    """Return the cluster's command for each host."""
    if cluster is None or job is None:
        return []
    return [cluster.command(node, job) for node in range(len(job.hosts))]


def _launcher_for(rendezvous: str, spec: Spec, policy: plugins.Policy) -> tuple[str, type[Launcher]]:
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


def _launcher(name: str, launcher_class: type[Launcher], facts: Mapping[str, Any], loaded: Loaded) -> Launcher:
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


def _batchnorm_row(recipe: Recipe, *, size: int, on_cpu: bool) -> dict[str, str]:
    """Say whose layers take the statistics of BatchNorm over ranks, where some do."""
    if not recipe.sync_batchnorm or size == 1:
        return {}
    own = f"mtrain's own layers, over {size} ranks"
    return {"sync BatchNorm": own if on_cpu else f"{own}; torch's own ones on CUDA, over torch's process group"}


def _hosts(spec: Spec, machine: Machine, *, device: str, single: bool) -> list[Host]:
    """Return the hosts of the job with their numbers of ranks; ``single``: the backend trains in one process."""
    cluster = spec.cluster
    addresses = cluster.ips or [LOOPBACK]
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated:
        raise SpecError(
            f"cluster.ips: {', '.join(repeated)} given twice; name each host once, with its ranks: "
            f"{placement.bracketed(repeated[0])}:2"
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


def _devices(spec: Spec, machine: Machine, *, option: str) -> Devices:
    ips, own = spec.cluster.ips, {address for _, address in machine.addresses}
    here = not ips or (len(ips) == 1 and ips[0] in own)
    device_counts = machine.devices_of or ([machine.devices] if here else None)
    return Devices(option=option, numbers=spec.cluster.devices, present=device_counts, hidden=machine.hidden)


def _launch_options(
    spec: Spec, machine: Machine, *, python: str, ranks: int, devices: tuple[int, ...] | None
) -> dict[str, Any]:
    """Return the values of ``LaunchOptions`` for the job."""
    cluster, alone = spec.cluster, len(spec.cluster.ips) <= 1
    # The bits of a result depend on the number of threads, so it must not change with the hosts that are there.
    fitting = 1 if elastic.is_elastic(spec) else max(1, machine.cores // ranks)
    threads = fitting if cluster.threads == "auto" else cluster.threads
    if cluster.master_port == "auto":
        port = machine.free_port if alone and not machine.present else machine.meeting_port
    else:
        port = cluster.master_port
    own = placement.loopback_like(cluster.ips[0]) if cluster.ips else LOOPBACK
    interface = cluster.interface
    if interface is None:
        candidates = [own] if alone else cluster.ips
        interface = placement.interface_of(machine.addresses, candidates)
    return {
        "python": spec.backend.python or python,
        "master_addr": cluster.master_addr or (own if alone else cluster.ips[0]),
        "master_port": port,
        "start_port": None if cluster.start_port == "auto" else cluster.start_port,
        "threads": threads,
        "devices": devices,
        "interface": interface,
    }


def _python_on_hosts(spec: Spec, cluster: Cluster | None, machine: Machine) -> str:
    """Return the path of the hosts' interpreter that has mtrain: the cluster's, else the path used here."""
    # Without a cluster, ``cluster.ssh.python`` counts as it did before clusters had options of their own.
    return (spec.cluster.ssh.python if cluster is None else cluster.python) or machine.python


def _hosted_job(spec: Spec, hosts: Sequence[Host], machine: Machine, *, python: str) -> HostedJob:
    return HostedJob(
        hosts=[host.address for host in hosts],
        agent=(python, *AGENT),
        line=tuple(machine.line),
        cluster=spec.cluster.name,
        failure_timeout_s=spec.cluster.failure_timeout_s,
    )


def _placed(command: Command, hosts: Sequence[Host], cluster: ClusterSpec, machine: Machine) -> Command:
    """Return the command without the name of this machine's network interface if it is for another host.

    The interface may have another name there. One that the spec sets is kept.
    """
    mine = {address for _, address in machine.addresses}
    if len(hosts) == 1 or cluster.interface is not None or command.host in mine:
        return command
    env = {name: value for name, value in command.env.items() if name not in placement.INTERFACE_VARIABLES}
    return Command(host=command.host, argv=command.argv, env=env, stdin=command.stdin)


def _largest_micro_batch(spec: Spec) -> dict[str, str]:
    """Return a remark on a micro batch that is not decided yet."""
    if spec.train.max_micro_batch != "auto":
        return {}
    return {"max_micro_batch": "auto: measured when the run starts, so there may be more micro batches than above"}


def _shares(recipe: Recipe, size: int) -> str:
    """Return into how many parts each micro batch of the job is divided, in words."""
    return f"{size} ranks" if recipe.shards in (None, size) else f"{recipe.shards} shards"


def _elastic_numbers(spec: Spec, recipe: Recipe, *, size: int) -> dict[str, Any]:
    """Return what is different in an elastic job, or where ranks compute several shards."""
    said: dict[str, Any] = {}
    if elastic.is_elastic(spec):
        said["elastic"] = f"goes on with {spec.cluster.min_nodes} of its hosts; threads and shards stay"
    if recipe.shards not in (None, size):
        passes = recipe.accumulate // rounds(recipe, size=size)
        said["shards"] = (
            f"{recipe.shards} among {size} ranks: {passes} passes of each rank for a micro batch of the job"
        )
    return said


def _precision_row(spec: Spec, *, on_cpu: bool) -> str:
    """Return the precision in words; where GPUs compute, only the ranks learn whether they are fast with bf16."""
    if spec.train.precision != AUTO:
        return spec.train.precision
    if on_cpu:
        return "fp32 (auto: ranks compute on the CPU, which is no faster with bf16)"
    return "auto: bf16 if the devices of all ranks are faster with it, else fp32; the ranks say which when they start"


def _numbers(spec: Spec, recipe: Any, *, hosts: Sequence[Host], threads: int, on_cpu: bool) -> dict[str, Any]:
    """Return the values that follow from the spec and the number of ranks, with the calculation that leads to each."""
    slots = [host.slots for host in hosts]
    size, train, factors = sum(slots), spec.train, scaling(spec)
    each = f" x {slots[0]}" if len(set(slots)) == 1 else ": " + " + ".join(map(str, slots))
    decays = sorted({group[1].get("weight_decay", 0.0) for group in recipe.groups}, reverse=True)
    return {
        "ranks": f"{size} ({len(hosts)} host{'s' if len(hosts) > 1 else ''}{each})",
        "global_batch": f"{train.batch_size} = {_shares(recipe, size)} x {recipe.micro_batch} (micro batch)"
        f" x {rounds(recipe, size=size)} (accumulate)",
        **_largest_micro_batch(spec),
        **_elastic_numbers(spec, recipe, size=size),
        "precision": _precision_row(spec, on_cpu=on_cpu),
        "rate": f"{spec.optimizer.rate * factors.rate:.6g}"
        f" ({train.rate_scaling}: {spec.optimizer.rate:g} x {factors.rate:.6g})",
        "weight_decay": ", ".join(f"{decay:.6g}" for decay in decays)
        + f" ({train.rate_scaling}: x {factors.weight_decay:.6g})",
        "schedule": f"{spec.schedule.name}, final factor {spec.schedule.final_factor:g}",
        "length": f"{train.updates} updates" if train.updates else f"{train.epochs} epochs",
        "updates_per_epoch": f"samples // {train.batch_size}; samples are counted at the start",
        "threads": f"{threads} per rank",
    }
