"""Recognise a job of Slurm: a batch script, a shell of ``salloc``, or a step that ``srun`` has started."""

import itertools
import math
import re
from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import MAX_HOST_NAME, MAX_HOSTS, Allocation, AllocationReader
from mtrain.launchers.allocations.variables import evidence, number

WHOLE_JOB_STEPS = ("4294967290", "4294967291")
"""Ids of the steps in which Slurm runs the shell of ``salloc`` and a batch script: one task, for the whole job."""
# Ports below 32768, where Linux begins to give ports to programs that ask for any.
FIRST_PORT, PORTS = 10_000, 10_000
"""The ports of steps."""
_PART = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*")
"""One entry of a list of hosts: text and brackets in turn, up to the next comma outside of brackets."""
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class Slurm(AllocationReader):
    """A step of one task is a job of one host, however large the job around it is."""

    distance: ClassVar[int] = 30

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the hosts of the step, or of the whole job for a process that runs once; None: it is one host."""
        if "SLURM_JOB_ID" not in environ:
            return None
        tasks = number(environ, "SLURM_STEP_NUM_TASKS")
        if tasks is None or environ.get("SLURM_STEP_ID") in WHOLE_JOB_STEPS:
            return _whole_job(environ)
        return _step(environ, tasks) if tasks > 1 else None

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the number of the job, or of its array and the place in it."""
        if "SLURM_ARRAY_JOB_ID" in environ:
            return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
        return environ.get("SLURM_JOB_ID")


def _whole_job(environ: Mapping[str, str]) -> Allocation | None:
    hosts = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if hosts is None or hosts < 2:
        return None
    names, tasks = environ.get("SLURM_JOB_NODELIST", ""), number(environ, "SLURM_NTASKS_PER_NODE")
    return Allocation(
        scheduler="Slurm",
        evidence=evidence(environ, "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
        hosts=hosts,
        host_names=expand_hosts(names),
        expand=_expand(names),
        processes=1,
        cluster="slurm",
        # One task per host is how people ask for hosts to start something else there, whatever devices they have.
        ranks_per_host=tasks if tasks is not None and tasks > 1 else None,
        one_each="srun --ntasks-per-node=1 mtrain ...",
        sources={
            "host_names": evidence(environ, "SLURM_JOB_NODELIST"),
            "ranks_per_host": evidence(environ, "SLURM_NTASKS_PER_NODE"),
        },
    )


def _step(environ: Mapping[str, str], tasks: int) -> Allocation:
    hosts = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    names, single = environ.get("SLURM_STEP_NODELIST", ""), hosts == tasks
    return Allocation(
        scheduler="Slurm",
        evidence=evidence(environ, "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        hosts=hosts,
        host_names=expand_hosts(names),
        expand=_expand(names),
        processes=tasks,
        process=number(environ, "SLURM_PROCID"),
        processes_per_host=1 if single else None,
        place=number(environ, "SLURM_NODEID") if single else None,
        port=_port(environ),
        one_each="srun --ntasks-per-node=1 mtrain ...",
        sources={
            "host_names": evidence(environ, "SLURM_STEP_NODELIST"),
            "place": evidence(environ, "SLURM_NODEID"),
            "port": evidence(environ, "SLURM_JOB_ID", "SLURM_STEP_ID"),
        },
    )


def _expand(names: str) -> tuple[str, ...]:
    return ("scontrol", "show", "hostnames", names) if names else ()


def _port(environ: Mapping[str, str]) -> int | None:
    """Return a port that every host of the step derives, and that other steps on a shared host seldom have."""
    job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
    return None if job is None or step is None else FIRST_PORT + (job * 31 + step) % PORTS


def expand_hosts(names: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form: ``node[1-3,07],gpu01`` has node1, node2, node3, node07, gpu01.

    Empty: the list is not in that form, has more than ``MAX_HOSTS``, or has a longer name than ``MAX_HOST_NAME``.
    ``scontrol show hostnames`` does the same, but is missing in many containers.
    """
    # Slurm writes no spaces; people do, where they set the variable by hand, beside commas or in their place.
    names = ",".join(re.sub(r"\s*,\s*", ",", names).split())
    hosts: list[str] = []
    position = 0
    while position < len(names):
        part = _PART.match(names, position)
        end = len(names) if part is None else part.end()
        if part is None or part.end() == position or (end < len(names) and names[end] != ","):
            return []
        try:
            hosts += _hosts_of(part.group(), most=MAX_HOSTS - len(hosts))
        except ValueError:
            return []
        position = end + 1
    return hosts


def _hosts_of(part: str, *, most: int) -> list[str]:
    """Return the hosts of one entry; of several brackets the last one counts fastest.

    Raises:
        ValueError: a bracket does not hold numbers and ranges, there are more than ``most`` hosts, or their names are too long.
    """
    texts = re.split(r"\[([^\]]*)\]", part)
    choices = [_numbers(text, most=most) if index % 2 else [text] for index, text in enumerate(texts)]
    if math.prod(map(len, choices)) > most:
        raise ValueError(f"more than {most} hosts")
    if sum(max(map(len, words)) for words in choices) > MAX_HOST_NAME:
        raise ValueError(f"a name of more than {MAX_HOST_NAME} characters")
    return ["".join(words) for words in itertools.product(*choices)]


def _numbers(text: str, *, most: int) -> list[str]:
    """Return the numbers of a bracket as texts, with their leading zeros: ``08-10,3`` has 08, 09, 10 and 3.

    Raises:
        ValueError: it holds something else, or more than ``most`` numbers.
    """
    numbers: list[str] = []
    for word in text.split(","):
        found = _RANGE.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no number and no range")
        first, last = found.group(1), found.group(2) or found.group(1)
        if max(len(first), len(last)) > MAX_HOST_NAME:
            raise ValueError("too many digits")
        if int(last) - int(first) >= most - len(numbers):
            raise ValueError(f"more than {most} numbers")
        numbers.extend(str(value).zfill(len(first)) for value in range(int(first), int(last) + 1))
    return numbers
