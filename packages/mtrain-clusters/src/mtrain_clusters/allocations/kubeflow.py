"""Recognise a pod of Kubeflow by the variables that it sets for torchrun: a TrainJob, or a PyTorchJob of version 1."""

import re
from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import MAX_HOST_NAME, MAX_HOSTS, Allocation, AllocationReader
from mtrain.launchers.allocations.variables import evidence, number, pods

_FIRST_OF_PYTORCHJOB = re.compile(r"([a-z0-9-]+)-master-0(|\..+)")
"""Name of the master of a PyTorchJob, whose other pods are ``NAME-worker-0``, ``NAME-worker-1`` ..."""
_FIRST = re.compile(r"([a-z0-9-]+-)0(|\..+)")
"""Name of a pod with index 0, as ``<job>-node-0-0.<job>`` of a TrainJob: the others have 1, 2 ... in that place."""


class Kubeflow(AllocationReader):
    """Each pod runs the command once, and is told how many there are, its own index and the name of the first."""

    distance: ClassVar[int] = 40

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the pods, if there are several. ``PET_NNODES`` may be a range, "2:4", whose pods have no fixed names."""
        hosts = pods(environ)
        # One pod is a job of one host, which nobody has to be asked about.
        if hosts is None or hosts < 2:
            return None
        place, first = number(environ, "PET_NODE_RANK"), environ.get("PET_MASTER_ADDR", "")
        port = number(environ, "PET_MASTER_PORT")
        return Allocation(
            scheduler="Kubeflow",
            evidence=evidence(environ, "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
            hosts=hosts,
            host_names=[] if ":" in environ["PET_NNODES"] else _pods(first, hosts),
            processes=hosts,
            process=place,
            processes_per_host=1,
            place=place,
            port=port if port and port < 65536 else None,
            ranks_per_host=number(environ, "PET_NPROC_PER_NODE"),
            sources={
                "host_names": evidence(environ, "PET_MASTER_ADDR", "PET_NNODES"),
                "place": evidence(environ, "PET_NODE_RANK"),
                "port": evidence(environ, "PET_MASTER_PORT"),
                "ranks_per_host": evidence(environ, "PET_NPROC_PER_NODE"),
            },
        )


def _pods(first: str, hosts: int) -> list[str]:
    """Return the names of all pods, which follow from the name of the first; empty: they do not, or a job cannot have as many."""
    if hosts > MAX_HOSTS or len(first) > MAX_HOST_NAME:
        return []
    if found := _FIRST_OF_PYTORCHJOB.fullmatch(first):
        name, domain = found.groups()
        return [first, *(f"{name}-worker-{index}{domain}" for index in range(hosts - 1))]
    if found := _FIRST.fullmatch(first):
        name, domain = found.groups()
        return [f"{name}{index}{domain}" for index in range(hosts)]
    return []
