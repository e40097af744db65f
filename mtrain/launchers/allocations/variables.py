"""Read numbers and texts from environment variables, and what a starter of processes says by them."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader

_MAX_SHOWN = 200
"""Most characters of a value that a message shows."""


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable among ``names`` that is a number, or None."""
    return next((int(environ[name]) for name in names if _is_number(environ.get(name, ""))), None)


def pods(environ: Mapping[str, str]) -> int | None:
    """Return how many pods a job of Kubeflow has, of a range "2:4" the most, or None."""
    return number({"nodes": environ.get("PET_NNODES", "").rpartition(":")[2]}, "nodes")


def evidence(environ: Mapping[str, str], *names: str) -> str:
    """Return the variables among ``names`` that are set, with their values, for a message."""
    values = {name: environ[name] for name in names if name in environ}
    return ", ".join(
        f"{name}={value if len(value) <= _MAX_SHOWN else f'{value[:_MAX_SHOWN]}... ({len(value)} characters)'}"
        for name, value in values.items()
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


class Starter(AllocationReader):
    """Recognises a starter that gives each process the number of processes, and its own index among them."""

    scheduler: ClassVar[str]
    """Its name in messages."""
    size: ClassVar[str]
    """The variable with the number of processes on all hosts."""
    rank: ClassVar[str]
    """The variable with the index of this process."""
    local: ClassVar[str] = ""
    """The variable with the number of processes on the same host, if there is one."""
    needs: ClassVar[str] = ""
    """A variable without which the others say nothing."""
    one_each: ClassVar[str] = ""
    """See ``Allocation.one_each``."""

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts, if there are several."""
        processes, place = number(environ, self.size), number(environ, self.rank)
        if (self.needs and self.needs not in environ) or processes is None or place is None or processes < 2:
            return None
        each = number(environ, self.local) if self.local else None
        return Allocation(
            scheduler=self.scheduler,
            evidence=evidence(environ, self.size, self.rank),
            hosts=processes if each == 1 else None,
            processes=processes,
            processes_per_host=each,
            place=place if each == 1 else None,
            process=place,
            one_each=self.one_each,
        )
