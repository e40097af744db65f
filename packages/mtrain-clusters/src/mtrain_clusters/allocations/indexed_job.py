"""Recognise an indexed Job of Kubernetes."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import evidence, number


class IndexedJob(AllocationReader):
    """Its pods know their own index but not how many there are, nor the others' names."""

    Options = NoOptions
    distance: ClassVar[int] = 60

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the place of this pod."""
        place = number(environ, "JOB_COMPLETION_INDEX")
        if place is None:
            return None
        return Allocation(
            scheduler="Kubernetes, as an indexed Job,",
            evidence=evidence(environ, "JOB_COMPLETION_INDEX"),
            processes_per_host=1,
            process=place,
            place=place,
        )
