"""A job as data: the exact commands of every host and the numbers that follow from the spec.

``mtrain plan`` prints it, ``mtrain train`` runs it. Nothing here imports a framework or starts anything.
"""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Command, Host, Launcher, Recipe
from mtrain.core.recipe import make_recipe, scaling
from mtrain.core.schedule import total_updates
from mtrain.errors import PluginError, SpecError
from mtrain.spec import plugins
from mtrain.spec.config import Loaded
from mtrain.spec.model import ClusterSpec, Spec
from mtrain.system import placement
from mtrain.system.devices import Devices
from mtrain.system.placement import LOOPBACK

SEVERAL_HOSTS_PORT = 29500
"""Rendezvous port that all hosts can know without asking each other."""
TYPED = ("flag", "override")
"""Origins of values that a person has just typed: they are obeyed or refused. A spec file's number of ranks, in
contrast, does not keep a backend that trains in one process from running the same spec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a plan depends on besides the spec: facts of this machine."""

    cores: int
    devices: int
    addresses: Sequence[tuple[str, str]] = ()
    """(interface, address)."""
    python: str = "python"
    free_port: int = SEVERAL_HOSTS_PORT
    hidden: bool = False
    """Whether the environment hides all accelerators."""
    devices_of: Sequence[int] = ()
    """Accelerators of each host of the job, where they have been asked; empty: they are like this machine."""
    meeting_port: int = SEVERAL_HOSTS_PORT
    """What several hosts take where the spec leaves the port open: one that is free on the first of them, once it was asked."""
    line: Sequence[str] = ()
    """The command that was typed here."""

    @classmethod
    def here(cls, *, environ: Mapping[str, str], python: str, line: Sequence[str] = ()) -> "Machine":
        """This machine, as a rank started with ``environ`` would see it."""
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
    """What would be started, where, with which environment."""

    title: str
    source: str
    run_dir: Path
    resume: Path | None
    backend: str
    launcher_name: str
    launcher: Launcher = field(repr=False, compare=False)
    """What starts the ranks of a host."""
    hosts: Sequence[Host]
    commands: Sequence[Command]
    """One per host, in the order of ``hosts``."""
    carrier: str = ""
    """The plugin that brings the commands to the hosts; empty: each is started there."""
    starts: bool = True
    """Whether anything is started by the command that makes this plan."""
    brought: Sequence[Sequence[str]] = ()
    """With a carrier: what it runs for each host, or what is typed there."""
    max_restarts: int
    log_dir: Path | None
    numbers: Mapping[str, Any]
    """Derived from the spec: global batch, micro batch, rates ..., name -> value, in the order of printing."""

    @property
    def size(self) -> int:
        """Ranks over all hosts."""
        return sum(host.slots for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """The lowest rank of a host."""
        return sum(host.slots for host in self.hosts[:node])

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "source": self.source,
            "run_dir": str(self.run_dir),
            "resume": str(self.resume) if self.resume else None,
            "backend": self.backend,
            "launcher": self.launcher_name,
            "carrier": self.carrier,
            "brought": [list(argv) for argv in self.brought],
            "max_restarts": self.max_restarts,
            "numbers": dict(self.numbers),
            "commands": [{"host": c.host, "argv": list(c.argv), "env": dict(c.env)} for c in self.commands],
        }

    def text(self) -> str:
        """For a person; the commands can be pasted into a shell."""
        head = {"spec": self.source, "run folder": str(self.run_dir), "resumes from": str(self.resume or "")}
        way = f" on each host, brought there by {self.carrier}" if self.carrier else ""
        head |= {"backend": f"{self.backend}, started by {self.launcher_name}{way}"}
        head |= {name.replace("_", " "): str(value) for name, value in self.numbers.items()}
        width = max(map(len, head)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in head.items() if value]
        for rank, command in enumerate(self.commands):
            lines += ["", f"host {rank}: {command.host}"]
            if self.brought:
                lines += [
                    "  " + shlex.join(self.brought[rank]),
                    "  which there starts" if self.starts else "  which starts",
                ]
            lines += _shell(command)
        return "\n".join(lines) + "\n"


def _shell(command: Command) -> list[str]:
    """The command as a shell would take it: variables in front, quoted where needed. For printing only."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items())]
    return ["  " + " ".join(variables) + " \\", "  " + shlex.join(command.argv)]


def make_plan(loaded: Loaded, *, run_dir: Path, resume: Path | None, machine: Machine, mode: str = "train") -> Plan:
    """The plan of a loaded spec on ``machine``; ``mode``: what the ranks do ("train", "evaluate", "predict").

    Raises:
        SpecError: hosts, ranks and batch do not fit together.
        PluginError: backend or launcher is unknown, or they do not fit together.
    """
    spec, policy = loaded.spec, loaded.policy
    given = spec.backend.options
    options = plugins.options("backends", spec.backend.name, given, path="backend.options", policy=policy)
    described = plugins.made("backends", spec.backend.name, options, policy=policy)
    carrier, launcher_name, launcher_class = _launcher_for(described.rendezvous, spec, policy)
    devices = _devices(spec, machine, option=str(getattr(options, "device", "auto")))
    devices.check()
    single = described.rendezvous == "none" and loaded.origin("cluster.nproc_per_node").kind not in TYPED
    hosts = _hosts(spec, machine, device=devices.option, single=single)
    ranks = max(host.slots for host in hosts)
    size = sum(host.slots for host in hosts)
    recipe = make_recipe(spec, size=size)
    if mode == "train":
        total_updates(spec, 1)  # only asks whether a length is given
    check_recipe(described, recipe, size=size, on_cpu=devices.on_cpu)
    launcher = launcher_class(_launch_options(launcher_class, spec, machine, ranks=ranks, devices=devices.visible))
    resumed = ["--resume", str(resume)] if resume else []
    chosen_mode = ["--mode", mode] if mode != "train" else []
    argv = ["-m", "mtrain.rank.worker", "--run-dir", str(run_dir), *chosen_mode, *resumed]
    commands = [_placed(command, hosts, spec.cluster, machine) for command in launcher.plan(argv, hosts, ranks)]
    bringing = None if carrier is None else carrier(_carry_options(carrier, spec, machine))
    return Plan(
        title=f"{run_dir.name}: {spec.model.name} on {spec.backend.name}",
        source=str(loaded.source),
        run_dir=run_dir,
        resume=resume,
        backend=spec.backend.name,
        launcher_name=launcher_name,
        launcher=launcher,
        hosts=hosts,
        commands=commands,
        carrier="" if carrier is None else spec.cluster.launcher,
        starts=bringing is None or bringing.starts,
        brought=() if bringing is None else [bringing.bring(host.address, node) for node, host in enumerate(hosts)],
        max_restarts=spec.cluster.max_restarts,
        log_dir=Path(spec.cluster.log_dir).absolute() if spec.cluster.log_dir else None,
        numbers=_numbers(spec, recipe, hosts=hosts, threads=launcher.options.threads) | {"devices": devices.words()},
    )


def _launcher_for(rendezvous: str, spec: Spec, policy: plugins.Policy) -> tuple[Any, str, Any]:
    """What brings commands to the hosts, if anything does, and what starts the ranks of one: the plugin that was asked for, or
    the first that provides what the backend needs; those with ``automatic = False`` come behind all others."""
    asked = spec.cluster.launcher
    found = None if asked == "auto" else plugins.load("launchers", asked, policy=policy)
    if found is not None and not getattr(found, "carries", False):
        if rendezvous not in found.provides:
            raise SpecError(
                f"cluster.launcher: {asked!r} given, it provides {', '.join(sorted(found.provides))}; "
                f"backend {spec.backend.name!r} needs {rendezvous!r}: use `auto`"
            )
        return None, asked, found
    if found is not None and not spec.cluster.ips:
        raise SpecError(
            f"cluster.launcher: {asked!r} given, but no host is named; give them with --ips A,B or --hostfile"
        )
    names = [entry.name for entry in plugins.names("launchers", policy=policy) if entry.enabled]
    broken: list[str] = []
    for automatic, name in itertools.product((True, False), names):
        try:
            launcher = plugins.load("launchers", name, policy=policy)
        except PluginError as error:  # nobody asked for this one
            broken.append(str(error))
            continue
        if rendezvous in getattr(launcher, "provides", ()) and getattr(launcher, "automatic", True) == automatic:
            return found, name, launcher
    raise SpecError(
        "; ".join(
            [
                f"backend.name: {spec.backend.name!r} needs a launcher that provides {rendezvous!r}; installed: {', '.join(names)}",
                *dict.fromkeys(broken),
            ]
        )
    )


def _hosts(spec: Spec, machine: Machine, *, device: str, single: bool) -> list[Host]:
    """The hosts with their ranks; ``single``: the backend trains in one process."""
    cluster = spec.cluster
    addresses = cluster.ips or [LOOPBACK]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise SpecError(
            f"cluster.ips: {', '.join(twice)} given twice; name each host once, with its ranks: {placement.bracketed(twice[0])}:2"
        )
    if cluster.slots is not None and len(cluster.slots) != len(cluster.ips):
        raise SpecError(
            f"cluster.slots: {len(cluster.slots)} numbers given for {len(cluster.ips)} hosts; give one for each of cluster.ips"
        )
    if single:
        return [Host(address=address) for address in addresses]
    if cluster.slots is not None:
        return [Host(address=address, slots=slots) for address, slots in zip(addresses, cluster.slots, strict=True)]
    present = machine.devices_of or [machine.devices] * len(addresses)
    return [
        Host(address=address, slots=_ranks_of(spec, devices, device=device))
        for address, devices in zip(addresses, present, strict=True)
    ]


def _ranks_of(spec: Spec, present: int, *, device: str) -> int:
    """``cluster.nproc_per_node`` on a host; auto: one per device that is asked for, one on CPU."""
    asked = spec.cluster.nproc_per_node
    devices = 0 if device == "cpu" else present
    chosen = spec.cluster.devices
    if asked == "auto":
        return max(1, len(chosen) if chosen is not None else devices)
    if chosen is not None and asked > len(chosen) > 0 and devices:
        raise SpecError(
            f"cluster.nproc_per_node: {asked} ranks given for {len(chosen)} devices ({chosen}); "
            "give as many devices, or fewer ranks"
        )
    return asked


def check_recipe(backend: Any, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
    """Ask a backend whether it can follow a recipe, before anything starts; one without ``check`` says so in its ranks.

    Raises:
        SpecError: it cannot.
    """
    if hasattr(backend, "check"):
        backend.check(recipe, size=size, on_cpu=on_cpu)


def _devices(spec: Spec, machine: Machine, *, option: str) -> Devices:
    ips, own = spec.cluster.ips, {address for _, address in machine.addresses}
    here = not ips or (len(ips) == 1 and ips[0] in own)
    present = machine.devices_of or ([machine.devices] if here else None)
    return Devices(option=option, numbers=spec.cluster.devices, present=present, hidden=machine.hidden)


def _launch_options(launcher: Any, spec: Spec, machine: Machine, *, ranks: int, devices: tuple[int, ...] | None) -> Any:
    cluster, alone = spec.cluster, len(spec.cluster.ips) <= 1
    threads = max(1, machine.cores // ranks) if cluster.threads == "auto" else cluster.threads
    if cluster.master_port == "auto":
        port = machine.free_port if alone else machine.meeting_port
    else:
        port = cluster.master_port
    own = placement.loopback_like(cluster.ips[0]) if cluster.ips else LOOPBACK
    interface = cluster.interface
    if interface is None:
        wanted = [own] if alone else cluster.ips
        interface = placement.interface_of(machine.addresses, wanted)
    return launcher.Options(
        python=spec.backend.python or _python_on_hosts(spec, machine),
        master_addr=cluster.master_addr or (own if alone else cluster.ips[0]),
        master_port=port,
        start_port=None if cluster.start_port == "auto" else cluster.start_port,
        threads=threads,
        devices=devices,
        interface=interface,
    )


def _python_on_hosts(spec: Spec, machine: Machine) -> str:
    """The interpreter that has mtrain: as here, unless ssh is told another one."""
    return spec.cluster.ssh.python or machine.python


def _carry_options(carrier: Any, spec: Spec, machine: Machine) -> Any:
    cluster = spec.cluster
    return carrier.Options(
        python=_python_on_hosts(spec, machine),
        line=tuple(machine.line),
        port=cluster.ssh.port,
        user=cluster.ssh.user,
        identity_file=cluster.ssh.identity_file,
        connect_timeout_s=cluster.ssh.connect_timeout_s,
        failure_timeout_s=cluster.failure_timeout_s,
    )


def _placed(command: Command, hosts: Sequence[Host], cluster: ClusterSpec, machine: Machine) -> Command:
    """Leave out the interface that was found here from the command of another host: it may have another name there."""
    mine = {address for _, address in machine.addresses}
    if len(hosts) == 1 or cluster.interface is not None or command.host in mine:
        return command
    env = {name: value for name, value in command.env.items() if name not in placement.INTERFACE_VARIABLES}
    return Command(host=command.host, argv=command.argv, env=env, stdin=command.stdin)


def _numbers(spec: Spec, recipe: Any, *, hosts: Sequence[Host], threads: int) -> dict[str, Any]:
    """What follows from the spec and the ranks, in words that a person can check."""
    slots = [host.slots for host in hosts]
    size, train, factors = sum(slots), spec.train, scaling(spec)
    each = f" x {slots[0]}" if len(set(slots)) == 1 else ": " + " + ".join(map(str, slots))
    decays = sorted({group[1].get("weight_decay", 0.0) for group in recipe.groups}, reverse=True)
    return {
        "ranks": f"{size} ({len(hosts)} host{'s' if len(hosts) > 1 else ''}{each})",
        "global_batch": f"{train.batch_size} = {size} ranks x {recipe.micro_batch} (micro batch)"
        f" x {recipe.accumulate} (accumulate)",
        "precision": recipe.precision,
        "rate": f"{spec.optimizer.rate * factors.rate:.6g}"
        f" ({train.rate_scaling}: {spec.optimizer.rate:g} x {factors.rate:.6g})",
        "weight_decay": ", ".join(f"{decay:.6g}" for decay in decays)
        + f" ({train.rate_scaling}: x {factors.weight_decay:.6g})",
        "schedule": f"{spec.schedule.name}, final factor {spec.schedule.final_factor:g}",
        "length": f"{train.updates} updates" if train.updates else f"{train.epochs} epochs",
        "updates_per_epoch": f"samples // {train.batch_size}; samples are counted at the start",
        "threads": f"{threads} per rank",
    }
