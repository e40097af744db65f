"""The GPUs of this host, divided among trials that run at the same time."""

from collections.abc import Mapping
from pathlib import Path

from mtrain.errors import UsageError
from mtrain.system import placement
from mtrain.system.devices import CPU, HIDING
from mtrain_sweep.definition import SweepDefinition

RANKS = "cluster.nproc_per_node"
Shares = tuple[tuple[str, ...], ...]
"""For each trial that runs at the same time, its GPUs as ``CUDA_VISIBLE_DEVICES`` names them."""


def shares(definition: SweepDefinition, *, jobs: int, environ: Mapping[str, str], dev: Path = Path("/dev")) -> Shares:
    """Return each trial's GPUs; empty where there is nothing to divide: one trial at a time, or no GPU.

    The GPUs are those of ``cluster.devices``, else those that ``environ`` lets this process see.

    Raises:
        UsageError: there are fewer GPUs than ranks of that many trials.
    """
    numbers = definition.base["cluster"].get("devices")
    on_cpu = definition.base["backend"].get("options", {}).get("device") == CPU
    # One trial at a time has all GPUs, as a job of its own.
    if jobs < 2 or on_cpu:
        return ()
    seen = visible(environ, dev) if numbers is None else [str(number) for number in numbers]
    if not seen:
        return ()
    ranks = _most_ranks(definition)
    each = len(seen) // jobs if ranks is None else ranks
    if each < 1 or each * jobs > len(seen):
        needed = jobs * (ranks or 1)
        largest = len(seen) // (ranks or 1)
        raise UsageError(
            f"--jobs {jobs}: {jobs} trials of {ranks or 1} ranks need {needed} GPUs, but {len(seen)} can be used "
            f"({', '.join(seen)}); "
            + (f"give --jobs {largest}" if largest else "give fewer ranks")
            + ", or train on the CPU with --devices cpu"
        )
    return tuple(tuple(seen[i * each : (i + 1) * each]) for i in range(jobs))


def visible(environ: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with ``environ`` sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = placement.count_devices(environ, dev=dev)
    named = [part.strip() for part in environ.get(HIDING, "").split(",") if part.strip()]
    return (named or [str(number) for number in range(count)])[:count]


def _most_ranks(definition: SweepDefinition) -> int | None:
    """Return the largest number of ranks of a trial; None: one for each GPU."""
    searched = [choice for one in definition.parameters if one.name == RANKS for choice in one.extremes()]
    ranks = searched or [definition.base["cluster"].get("nproc_per_node", "auto")]
    numbers = [number for number in ranks if isinstance(number, int)]
    return max(numbers) if len(numbers) == len(ranks) else None
