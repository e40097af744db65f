"""Read numbers and texts from environment variables."""

from collections.abc import Mapping

from mtrain.core.interfaces.allocation import Allocation

_MAX_SHOWN = 200
"""Most characters of a value that a message shows."""


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable among ``names`` that is a number, or None."""
    return next((int(environ[name]) for name in names if _is_number(environ.get(name, ""))), None)


def evidence(environ: Mapping[str, str], *names: str) -> str:
    """Return the variables among ``names`` that are set, with their values, for a message."""
    values = {name: environ[name] for name in names if name in environ}
    return ", ".join(
        f"{name}={value if len(value) <= _MAX_SHOWN else f'{value[:_MAX_SHOWN]}... ({len(value)} characters)'}"
        for name, value in values.items()
    )


def several_processes(
    environ: Mapping[str, str], *, scheduler: str, size: str, rank: str, one_each: str = "", local: str = ""
) -> Allocation | None:
    """Recognise a starter that gives each process the number of processes (``size``) and its own index (``rank``).

    ``local``: the variable with the number of processes on the same host, if there is one. None: it has started fewer
    than two.
    """
    processes, place = number(environ, size), number(environ, rank)
    if processes is None or place is None or processes < 2:
        return None
    each = number(environ, local) if local else None
    return Allocation(
        scheduler=scheduler,
        evidence=evidence(environ, size, rank),
        hosts=processes if each == 1 else None,
        processes=processes,
        processes_per_host=each,
        place=place if each == 1 else None,
        process=place,
        one_each=one_each,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
