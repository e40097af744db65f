"""The commands of a job: what each host runs, and what brings it there."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Command, Host, HostedJob, Launcher
from mtrain.jobs.plan import elastic
from mtrain.jobs.plan.host_ranks import address_of
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.team import Team
from mtrain.spec.config import Loaded
from mtrain.system import placement
from mtrain.system.placement import LOOPBACK

AGENT = ("-m", "mtrain.jobs.hosts.agent")
"""Arguments of the interpreter that runs an agent."""


def rank_words(loaded: Loaded, *, run_dir: Path, resume: Path | None, mode: str) -> list[str]:
    """Return the arguments of the interpreter that runs a rank; ``mode``: see ``Brief``."""
    mode = mode if loaded.script is None else "script"
    resumed = ["--resume", str(resume)] if resume else []
    is_program = "." in mode
    chosen_mode = ["--mode", mode] if mode != "train" and not is_program else []
    program = ["-m", mode] if is_program else ["-m", "mtrain.rank.worker"]
    words = [*program, "--run-dir", str(run_dir), *chosen_mode, *resumed]
    script = loaded.script
    if script is None:
        return words
    outside_paths = ["--outside-paths", ",".join(script.outside_paths)] if script.outside_paths else []
    trial = [] if script.trial is None else ["--trial", script.trial.text()]
    return [*words, "--script-digest", script.digest, *outside_paths, *trial, "--", str(script.path), *script.arguments]


def launch_options(team: Team, machine: Machine, *, python: str) -> dict[str, Any]:
    """Return the values of ``LaunchOptions`` for the job."""
    spec = team.spec
    cluster, alone = spec.cluster, len(spec.cluster.ips) <= 1
    # The bits of a result depend on the number of threads, so it must not change with the hosts that are there.
    fitting = 1 if elastic.is_elastic(spec) else max(1, machine.cores // team.ranks)
    threads = fitting if cluster.threads == "auto" else cluster.threads
    if cluster.master_port == "auto":
        port = machine.free_port if alone and not machine.present else machine.meeting_port
    else:
        port = cluster.master_port
    # Ranks of one host meet at its loopback address, which no firewall and no change of network reaches.
    own = placement.loopback_like(cluster.ips[0]) if cluster.ips else LOOPBACK
    interface = cluster.interface
    if interface is None:
        candidates = [own] if alone else cluster.ips
        interface = placement.interface_of(machine.addresses, candidates)
    master = cluster.master_addr or (own if alone else cluster.ips[0])
    if not team.launcher_class.takes_names:
        master = address_of(master, machine, alone=len(team.hosts) == 1)
    return {
        "python": spec.backend.python or python,
        "master_addr": master,
        "master_port": port,
        "start_port": None if cluster.start_port == "auto" else cluster.start_port,
        "threads": threads,
        "devices": team.devices.visible,
        "interface": interface,
    }


def commands_of(team: Team, machine: Machine, launcher: Launcher, words: Sequence[str]) -> list[Command]:
    """Return the command of each host that takes part.

    Args:
        team: See ``Team``.
        machine: See ``Machine``.
        launcher: Starts the ranks of each host.
        words: Arguments of the interpreter that runs a rank.

    Raises:
        SpecError: the launcher cannot start ranks on these hosts, or on fewer of them if the job is elastic.
    """

    def plan(hosts: Sequence[Host]) -> Sequence[Command]:
        return launcher.plan(words, hosts, max(host.slots for host in hosts))

    made = [
        place(dataclasses.replace(command, host=host.address), team, machine)
        for command, host in zip(plan(team.as_launcher_takes(team.hosts, machine)), team.hosts, strict=True)
    ]
    if elastic.has_rank_per_shard(team.spec, on_cpu=team.devices.on_cpu):
        elastic.check_every_number(
            team.as_launcher_takes(team.all_hosts, machine),
            fewest=team.spec.cluster.min_nodes or 1,
            shards=team.shards,
            plan=plan,
        )
    return made


def hosted_job_of(team: Team, machine: Machine, *, python: str) -> HostedJob | None:
    """Return the facts about the job that its cluster receives; None if it has no cluster."""
    if team.cluster is None:
        return None
    return HostedJob(
        hosts=[host.address for host in team.hosts],
        agent=(python, *AGENT),
        line=tuple(machine.line),
        cluster=team.spec.cluster.name,
        failure_timeout_s=team.spec.cluster.failure_timeout_s,
    )


def place(command: Command, team: Team, machine: Machine) -> Command:
    """Return the command without the name of this machine's network interface if it is for another host."""
    # The interface may have another name there, and its agent finds it out. One that the spec sets is kept.
    mine = {address for _, address in machine.addresses}
    if len(team.hosts) == 1 or team.spec.cluster.interface is not None or command.host in mine:
        return command
    env = {name: value for name, value in command.env.items() if name not in placement.INTERFACE_VARIABLES}
    return Command(host=command.host, argv=command.argv, env=env, stdin=command.stdin)
