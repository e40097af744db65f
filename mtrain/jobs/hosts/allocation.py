"""The allocation in which this process runs: found by the plugins of the group ``mtrain.allocations``, and in words.

``allocated_hosts`` gives its hosts to a spec.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mtrain.core.interfaces.allocation import MAX_HOSTS, Allocation, AllocationReader
from mtrain.errors import PluginError, UsageError
from mtrain.spec import packages
from mtrain.spec.files import read_text
from mtrain.spec.plugins import POLICY_FILE
from mtrain.spec.registry import Registry

KIND = "allocations"
EXPAND_S = 60.0
"""Seconds that the command may take that lists the hosts."""
MAX_ERROR = 200
"""Most characters of that command's error that a message shows."""

_COUNT = r"([2-9]|[1-9]\d+)"
SEVERAL: Mapping[str, Mapping[str, str]] = {
    "slurm": {"SLURM_STEP_NUM_TASKS": _COUNT, "SLURM_NNODES": _COUNT},
    "pmi": {"PMI_SIZE": _COUNT},
    "lsf": {"LSB_MCPU_HOSTS": r"\S+\s+\S+\s+\S.*"},
    "pbs": {"PBS_NODEFILE": r"\S+\s+\S.*"},
    "kubeflow": {"PET_NNODES": f"(.*:)?{_COUNT}"},
    "sagemaker": {"SM_HOSTS": r"\[[^\]]*,.*", "SM_RESOURCE_CONFIG": r'.*"hosts"\s*:\s*\[[^\]]*,.*'},
    "indexed_job": {"JOB_COMPLETION_INDEX": r"\d+"},
}
"""Reader of a package -> its variables, each with the form that shows several processes or hosts (of a file: its words, each once)."""
MAX_READ, MAX_NODEFILE_BYTES = 4096, 1 << 24
"""Most characters of a variable that are looked at, and the largest file of hosts."""
MAX_TYPED = 32
"""Most hosts that a message names."""


def readers(registry: Registry | None = None) -> list[AllocationReader]:
    """Return the enabled plugins, those of programs closest to this process first.

    Raises:
        PluginError: one of them cannot be loaded. Leaving it out could start several jobs in place of one.
    """
    registry = Registry.read() if registry is None else registry
    made = [_make_reader(entry.name, registry) for entry in registry.usable(KIND)]
    return sorted(made, key=lambda reader: reader.distance)


def recognise(environ: Mapping[str, str], *, registry: Registry | None = None) -> Allocation | None:
    """Return the allocation of several processes or hosts that this process belongs to, or None.

    Raises:
        PluginError: a plugin cannot be loaded, or fails.
    """
    # The closest program counts: what torchrun starts inside a job of a scheduler is one process of several already.
    for reader in readers(registry):
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


def refuse_unread(environ: Mapping[str, str], *, registry: Registry) -> None:
    """Refuse an allocation of several processes or hosts whose reader is of a package that is not installed.

    Raises:
        UsageError: there is one; the message names the variable that shows it, and the package.
    """
    known = {entry.name for entry in registry.names(KIND)}
    if _has_form(environ, "PET_NNODES", "(.*:)?1"):
        known.add("indexed_job")  # The only pod of a TrainJob is one of an indexed Job, too.
    for name, forms in SEVERAL.items():
        shown = "" if name in known else next((each for each in forms if _has_form(environ, each, forms[each])), "")
        if shown and registry.policy.allows(KIND, name):
            what = f"{shown}={environ[shown][:MAX_ERROR]} shows several processes or hosts, and what reads it is"
            words = packages.absent(packages.bringing(KIND, name) or "", what)
            raise UsageError(f"{words}; for a job of this process alone, add --nnodes 1")


def _has_form(environ: Mapping[str, str], variable: str, form: str) -> bool:
    # Anybody may set a variable to anything, and forms are searched in it.
    value = environ.get(variable, "")[:MAX_READ]
    if value and variable.endswith("FILE"):  # of hosts, one of which may have several lines
        file, value = value, ""
        with suppress(OSError, ValueError):  # A shell that left its job may still have the variable, but not the file.
            value = " ".join(dict.fromkeys(read_text(Path(file), limit=MAX_NODEFILE_BYTES).split()))
    return re.fullmatch(form, value.strip(), re.DOTALL) is not None


def job_id(environ: Mapping[str, str], *, registry: Registry | None = None) -> str | None:
    """Return the scheduler's id of this job, with its place in an array of jobs; None outside of a scheduler.

    It is safe as a part of a file's name. A job that the scheduler puts back into its queue keeps its id.
    """
    words = next((words for reader in readers(registry) if (words := reader.job_id(environ))), None)
    return words and "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in words)


def host_names(allocation: Allocation, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts, as the allocation's command lists them, else as its variables do.

    Empty: neither tells them.

    Raises:
        UsageError: there are not as many as the scheduler has said, or more than a job can have.
    """
    names = _lines_of(allocation.expand, environ) or list(allocation.host_names)
    if names and allocation.hosts is not None and len(names) != allocation.hosts:
        shown = ", ".join(names[:MAX_TYPED]) + (", ..." if len(names) > MAX_TYPED else "")
        raise UsageError(
            f"{allocation.scheduler} has given this job {allocation.hosts} hosts ({allocation.evidence}), but names "
            f"{len(names)}: {shown} ({allocation.source('host_names')}); name them with --ips A,B,..."
        )
    if len(names) > MAX_HOSTS:
        raise UsageError(
            f"{allocation.scheduler} has given this job {len(names)} hosts ({allocation.evidence}), but a job has at most "
            f"{MAX_HOSTS}; name some of them with --ips A,B,..."
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
    if 0 < len(allocation.host_names) <= MAX_TYPED:
        names = f"--ips {','.join(allocation.host_names)}"
        return f"{once} with {names}" if allocation.copies else f"add --cluster ssh {names}, or {once} with {names}"
    return f"{once} with --ips A,B,... with the addresses of its hosts, the same for each"


def _lines_of(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the lines that ``command`` prints; empty where it is missing or fails."""
    # In a container, a scheduler's variables are there and its programs are not. Its variables list the hosts, too.
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


def _make_reader(name: str, registry: Registry) -> AllocationReader:
    try:
        made: AllocationReader = registry.make(KIND, name, {}, path=f"{POLICY_FILE} [{KIND}.{name}] options")
    except PluginError as error:
        raise PluginError(
            f'{error}; to do without it, write [{KIND}] disabled = ["{name}"] into {POLICY_FILE}'
        ) from error
    return made
