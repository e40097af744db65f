"""The allocation in which this process runs: found by the plugins of the group ``mtrain.allocations``, and in words.

``allocated_hosts`` gives its hosts to a spec.
"""

import subprocess
from collections.abc import Mapping, Sequence

from mtrain.core.allocation import Allocation, AllocationReader
from mtrain.errors import PluginError, UsageError
from mtrain.spec import plugins
from mtrain.spec.plugins import POLICY_FILE, Policy

KIND = "allocations"
EXPAND_S = 60.0
"""Seconds that the command may take that lists the hosts."""
MAX_ERROR = 200
"""Most characters of that command's error that a message shows."""


def readers(policy: Policy | None = None) -> list[AllocationReader]:
    """Return the enabled plugins, those of programs closest to this process first.

    Raises:
        PluginError: one of them cannot be loaded. Leaving it out could start several jobs in place of one.
    """
    policy = policy or plugins.read_policy()
    names = [entry.name for entry in plugins.names(KIND, policy=policy) if entry.enabled]
    made = {name: _made(name, policy) for name in names}
    return sorted(made.values(), key=lambda reader: reader.distance)


def recognised(environ: Mapping[str, str], *, policy: Policy | None = None) -> Allocation | None:
    """Return the allocation of several processes or hosts that this process belongs to, or None.

    Raises:
        PluginError: a plugin cannot be loaded, or fails.
    """
    for reader in readers(policy):
        try:
            allocation = reader.read(environ)
        except Exception as error:  # Foreign code may raise any exception.
            what = f"{type(reader).__module__}:{type(reader).__qualname__}"
            raise PluginError(
                f"{what}, which recognises allocations, failed: {type(error).__name__}: {error}"
            ) from error
        if allocation is not None:
            return allocation
    return None


def job_id(environ: Mapping[str, str], *, policy: Policy | None = None) -> str | None:
    """Return the scheduler's id of this job, with its place in an array of jobs; None outside of a scheduler.

    It is safe as a part of a file's name. A job that the scheduler puts back into its queue keeps its id.
    """
    words = next((words for reader in readers(policy) if (words := reader.job_id(environ))), None)
    return words and "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in words)


def host_names(allocation: Allocation, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts, as the allocation's command lists them, else as its variables do.

    Empty: neither tells them.

    Raises:
        UsageError: there are not as many as the scheduler has said.
    """
    names = _listed(allocation.expand, environ) or list(allocation.host_names)
    if names and allocation.hosts is not None and len(names) != allocation.hosts:
        raise UsageError(
            f"{allocation.scheduler} has given this job {allocation.hosts} hosts ({allocation.evidence}), but names "
            f"{len(names)}: {', '.join(names)} ({allocation.source('host_names')}); name them with --ips A,B,..."
        )
    return names


def contradiction(allocation: Allocation) -> str:
    """Return the message that says why a job of one host is not started in ``allocation``, and what to type instead."""
    if allocation.copies:
        place = "" if allocation.process is None else f"number {allocation.process} "
        count = "several" if allocation.processes is None else str(allocation.processes)
        problem = f"this is process {place}of {count} that {allocation.scheduler} starts ({allocation.evidence})"
        result = "each of them would train a job of its own"
    else:
        problem = f"{allocation.scheduler} has given this job {allocation.hosts} hosts ({allocation.evidence})"
        result = "it would train on this one alone"
    return (
        f"{problem}, but no host is named with --ips: {result}. For one job on all hosts, {_remedy(allocation)}; mtrain "
        "itself starts the ranks of a host (--nproc-per-node). For a job of this process alone, add --nnodes 1"
    )


def _remedy(allocation: Allocation) -> str:
    """Return how to start one job on all hosts, as an instruction."""
    once = f"start mtrain once on each host{f' ({allocation.one_each})' if allocation.one_each else ''}"
    if allocation.copies and allocation.expand:
        return once  # The hosts are taken from the scheduler then.
    if allocation.host_names:
        names = f"--ips {','.join(allocation.host_names)}"
        return f"{once} with {names}" if allocation.copies else f"add --cluster ssh {names}, or {once} with {names}"
    return f"{once} with --ips A,B,... with the addresses of its hosts, the same for each"


def _listed(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the lines that ``command`` prints; empty where it is missing or fails, as in a container."""
    if not command:
        return []
    try:
        output = subprocess.run(  # noqa: S603 - the command of a plugin
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=EXPAND_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return output.decode(errors="replace").split()


def _made(name: str, policy: Policy) -> AllocationReader:
    try:
        options = plugins.options(KIND, name, {}, path=f"{POLICY_FILE} [{KIND}.{name}] options", policy=policy)
        made: AllocationReader = plugins.made(KIND, name, options, policy=policy)
    except PluginError as error:
        raise PluginError(
            f'{error}; to do without it, write [{KIND}] disabled = ["{name}"] into {POLICY_FILE}'
        ) from error
    return made
