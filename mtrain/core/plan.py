"""A job as data: the exact commands of every host and the numbers that follow from the spec.

``mtrain plan`` prints it, ``mtrain train`` runs it. Nothing here imports a framework or starts anything.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.core import placement, plugins
from mtrain.core.config import Loaded
from mtrain.core.errors import SpecError
from mtrain.core.interfaces import Command, Host, Launcher
from mtrain.core.optimizer import make_recipe, scaling
from mtrain.core.placement import LOOPBACK
from mtrain.core.spec import ClusterSpec, Spec

SEVERAL_HOSTS_PORT = 29500
"""Rendezvous port that all hosts can know without asking each other."""
TYPED = ("flag", "override")
"""Origins of values that a person has just typed: they are obeyed or refused. A spec file's number of ranks, in
contrast, does not keep a backend that trains in one process from running the same spec."""
AUTOMATIC_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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

    @classmethod
    def here(cls, *, environ: Mapping[str, str], python: str) -> "Machine":
        """This machine, as a rank started with ``environ`` would see it."""
        return cls(
            cores=placement.usable_cores(),
            devices=placement.count_devices(environ),
            addresses=placement.own_addresses(),
            python=python,
            free_port=placement.free_port(),
            hidden=placement.hides_devices(environ),
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
    hosts: Sequence[Host]
    commands: Sequence[Command]
    """One per host, in the order of ``hosts``."""
    max_restarts: int
    log_dir: Path | None
    numbers: Mapping[str, Any]
    """Derived from the spec: global batch, micro batch, rates ..., name -> value, in the order of printing."""

    @property
    def size(self) -> int:
        """Ranks over all hosts."""
        return sum(host.slots for host in self.hosts)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "source": self.source,
            "run_dir": str(self.run_dir),
            "resume": str(self.resume) if self.resume else None,
            "backend": self.backend,
            "launcher": self.launcher_name,
            "max_restarts": self.max_restarts,
            "numbers": dict(self.numbers),
            "commands": [{"host": c.host, "argv": list(c.argv), "env": dict(c.env)} for c in self.commands],
        }

    def text(self) -> str:
        """For a person; the commands can be pasted into a shell."""
        head = {"spec": self.source, "run folder": str(self.run_dir), "resumes from": str(self.resume or "")}
        head |= {"backend": f"{self.backend}, started by {self.launcher_name}"}
        head |= {name.replace("_", " "): str(value) for name, value in self.numbers.items()}
        width = max(map(len, head)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in head.items() if value]
        for rank, command in enumerate(self.commands):
            lines += ["", f"host {rank}: {command.host}", *_shell(command)]
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
    backend = plugins.load("backends", spec.backend.name, policy=policy)
    given = spec.backend.options
    options = plugins.options("backends", spec.backend.name, given, path="backend.options", policy=policy)
    described = backend(options)
    launcher_name, launcher_class = _launcher_for(described.rendezvous, spec, policy)
    hosts = [Host(address=address) for address in spec.cluster.ips or [LOOPBACK]]
    device = getattr(options, "device", "auto")
    ranks = _ranks_per_host(spec, machine, device=device)
    if described.rendezvous == "none" and loaded.origin("cluster.nproc_per_node").kind not in TYPED:
        ranks = 1
    hosts = [Host(address=host.address, slots=ranks) for host in hosts]
    recipe = make_recipe(spec, size=ranks * len(hosts))
    devices = _devices(spec, machine, device=device)
    launcher = launcher_class(_launch_options(launcher_class, spec, machine, ranks=ranks, devices=devices))
    resumed = ["--resume", str(resume)] if resume else []
    chosen_mode = ["--mode", mode] if mode != "train" else []
    argv = ["-m", "mtrain.worker", "--run-dir", str(run_dir), *chosen_mode, *resumed]
    commands = [_placed(command, hosts, spec.cluster, machine) for command in launcher.plan(argv, hosts, ranks)]
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
        max_restarts=spec.cluster.max_restarts,
        log_dir=Path(spec.cluster.log_dir).absolute() if spec.cluster.log_dir else None,
        numbers=_numbers(spec, recipe, hosts=hosts, ranks=ranks, threads=launcher.options.threads),
    )


def _launcher_for(rendezvous: str, spec: Spec, policy: plugins.Policy) -> tuple[str, Any]:
    """The launcher that was asked for, else the first one that provides what the backend needs."""
    asked = spec.cluster.launcher
    if asked != "auto":
        found = plugins.load("launchers", asked, policy=policy)
        if rendezvous not in found.provides:
            raise SpecError(
                f"cluster.launcher: {asked!r} given, it provides {', '.join(sorted(found.provides))}; "
                f"backend {spec.backend.name!r} needs {rendezvous!r}: use `auto`"
            )
        return asked, found
    names = [entry.name for entry in plugins.names("launchers", policy=policy) if entry.enabled]
    for name in names:
        launcher = plugins.load("launchers", name, policy=policy)
        if rendezvous in launcher.provides:
            return name, launcher
    raise SpecError(
        f"backend.name: {spec.backend.name!r} needs a launcher that provides {rendezvous!r}; "
        f"installed: {', '.join(names)}"
    )


def _ranks_per_host(spec: Spec, machine: Machine, *, device: str) -> int:
    """``cluster.nproc_per_node``; auto: one per device that is asked for, one on CPU."""
    asked = spec.cluster.nproc_per_node
    devices = 0 if device == "cpu" else machine.devices
    chosen = spec.cluster.devices
    if asked == "auto":
        return max(1, len(chosen) if chosen is not None else devices)
    if chosen is not None and asked > len(chosen) > 0 and devices:
        raise SpecError(
            f"cluster.nproc_per_node: {asked} ranks given for {len(chosen)} devices ({chosen}); "
            "give as many devices, or fewer ranks"
        )
    return asked


def _devices(spec: Spec, machine: Machine, *, device: str) -> tuple[int, ...] | None:
    """Device numbers on every host; none where ranks compute on the CPU; None: all that a host has."""
    if device == "cpu" or (machine.hidden and spec.cluster.devices is None):
        return ()
    return None if spec.cluster.devices is None else tuple(spec.cluster.devices)


def _launch_options(launcher: Any, spec: Spec, machine: Machine, *, ranks: int, devices: tuple[int, ...] | None) -> Any:
    cluster, alone = spec.cluster, len(spec.cluster.ips) <= 1
    threads = max(1, machine.cores // ranks) if cluster.threads == "auto" else cluster.threads
    if cluster.master_port == "auto":
        port = machine.free_port if alone else SEVERAL_HOSTS_PORT
    else:
        port = cluster.master_port
    interface = cluster.interface
    if interface is None:
        wanted = [LOOPBACK] if alone else cluster.ips
        interface = placement.interface_of(machine.addresses, wanted)
    return launcher.Options(
        python=spec.backend.python or machine.python,
        master_addr=cluster.master_addr or (LOOPBACK if alone else cluster.ips[0]),
        master_port=port,
        start_port=None if cluster.start_port == "auto" else cluster.start_port,
        threads=threads,
        devices=devices,
        interface=interface,
    )


def _placed(command: Command, hosts: Sequence[Host], cluster: ClusterSpec, machine: Machine) -> Command:
    """Leave out the interface that was found here from the command of another host: it may have another name there."""
    mine = {address for _, address in machine.addresses}
    if len(hosts) == 1 or cluster.interface is not None or command.host in mine:
        return command
    env = {name: value for name, value in command.env.items() if name not in AUTOMATIC_INTERFACE}
    return Command(host=command.host, argv=command.argv, env=env, stdin=command.stdin)


def _numbers(spec: Spec, recipe: Any, *, hosts: Sequence[Host], ranks: int, threads: int) -> dict[str, Any]:
    """What follows from the spec and the ranks, in words that a person can check."""
    size, train, factors = ranks * len(hosts), spec.train, scaling(spec)
    decays = sorted({group[1].get("weight_decay", 0.0) for group in recipe.groups}, reverse=True)
    return {
        "ranks": f"{size} ({len(hosts)} host{'s' if len(hosts) > 1 else ''} x {ranks})",
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
