"""Check that all ranks read the same samples from a user's data set, and describe a sample."""

from collections.abc import Mapping
from typing import Any

from mtrain.core.interfaces import Collective
from mtrain.core.state.digest import digest
from mtrain.data import trees
from mtrain.data.objects import CHECKED_SAMPLES
from mtrain.errors import DataError
from mtrain.tasks.own.source import OwnSource


def check_equal_data(sources: Mapping[str, OwnSource], collective: Collective, *, values: bool) -> None:
    """Refuse data sets that differ between ranks in length, or with ``values`` in their first samples.

    Every rank must call.

    Raises:
        DataError: they differ; it is raised on every rank.
    """
    mine = {name: (len(source), _digest(source) if values else "") for name, source in sources.items()}
    everybody = collective.all_gather(mine)
    for name in sources:
        lengths = sorted({facts[name][0] for facts in everybody})
        if len(lengths) > 1:
            raise DataError(
                f"data.format: the {name} split has {' and '.join(map(str, lengths))} samples on different ranks; make it the "
                "same on every rank, without random numbers that no seed determines"
            )
        if len({facts[name][1] for facts in everybody}) > 1:
            raise DataError(
                f"data.format: the first samples of the {name} split differ between ranks; make the data set the same on every "
                "rank: seed the framework's random numbers in its constructor"
            )


def _digest(source: OwnSource) -> str:
    arrays = {}
    for index in range(min(CHECKED_SAMPLES, len(source))):
        found = trees.contents(source.sample(0, index)[1])
        arrays.update({f"{index}.{name}": array for name, array in found.items()})
    return digest(arrays)


def outline(sample: Any) -> str:
    """Return the structure of a sample in words: shapes and types of its arrays."""
    arrays = trees.contents(sample)
    parts = [f"{name or 'value'} {array.dtype} {array.shape}" for name, array in arrays.items()]
    return ", ".join(parts) or f"a {type(sample).__name__} without arrays"
