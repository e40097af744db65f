"""Samples of a user's own data set for the loader, each a function of (seed, epoch, index)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, Collective
from mtrain.core.state.digest import digest
from mtrain.data import trees
from mtrain.data.objects import CHECKED_SAMPLES, first_unrepeatable, seeded_sample
from mtrain.errors import DataError, MtrainError
from mtrain.spec.references import Reference, tell_error
from mtrain.tasks.own import layout


class OwnSource:
    """One split as samples, read in the process of the rank. Implements ``Source`` of ``core.interfaces``.

    Before each sample the generators of Python, numpy and the framework are seeded by (seed, epoch, index).
    """

    def __init__(self, dataset: Any, reference: Reference, *, split: str, seed: int, floats: Any) -> None:
        """``floats``: dtype into which arrays of floating-point numbers are converted; None keeps theirs."""
        self._dataset = dataset
        self._reference = reference
        self._split = split
        self._seed = seed
        self._floats = floats
        self._length = len(dataset)
        self._epoch = -1
        self.seed_framework: Callable[[int], None] = _nothing

    def __len__(self) -> int:
        return self._length

    def sample(self, epoch: int, index: int, *, update: int = 0) -> tuple[int, Any]:
        """Return the number of a sample and the sample.

        Raises:
            DataError: the data set raises an exception, or its length has changed.
        """
        if epoch != self._epoch:
            self._begin(epoch)
        try:
            return index, seeded_sample(self._dataset, index, (self._seed, epoch, index), self.seed_framework)
        except MtrainError:
            raise
        except Exception as error:  # A user's code may raise any exception.
            reason = tell_error(error, self._reference.file)
            raise DataError(f"sample {index} of the {self._split} split cannot be read: {reason}") from error

    def _begin(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if len(self._dataset) != self._length:
            raise DataError(
                f"data.format: {self._reference.text}: the {self._split} split had {self._length} samples at the start and has "
                f"{len(self._dataset)} in epoch {epoch}; keep its length, so that epochs can be divided among ranks and resumed"
            )
        self._epoch = epoch

    def collate(self, samples: Sequence[tuple[int, Any]]) -> dict[str, Array]:
        """Join samples with the data set's own ``collate``, else by stacking; add ``index``.

        Raises:
            DataError: they cannot be joined, or the batch cannot be given to a model.
        """
        own = getattr(self._dataset, "collate", None)
        values = [value for _, value in samples]
        try:
            batch = trees.collate(values) if own is None else own(values)
        except MtrainError as error:
            raise DataError(f"data.format: {self._reference.text}: {error}") from error
        except Exception as error:  # A user's code may raise any exception.
            raise DataError(
                f"{self._reference.text}: its collate failed: {tell_error(error, self._reference.file)}"
            ) from error
        where = f"data.format: {self._reference.text}: a batch"
        arrays = layout.pack(batch, self._leaf, where=where)
        return {**arrays, "index": np.array([index for index, _ in samples], dtype=np.int64)}

    def _leaf(self, path: str, value: Any) -> Array | None:
        array = trees.as_array(value)
        if array is None or array.dtype == object or array.dtype.kind in "US":
            return None
        return array.astype(self._floats) if self._floats is not None and array.dtype.kind == "f" else array

    def check_repeatable(self) -> None:
        """Refuse a data set that returns different values for the same (seed, epoch, index).

        Raises:
            DataError: it does, so a resumed job could not continue to the same weights.
        """
        index = first_unrepeatable(lambda number: self.sample(0, number)[1], self._length)
        if index is not None:
            raise DataError(
                f"data.format: {self._reference.text}: sample {index} differs when it is read twice with the same seeds, so a "
                "resumed job would train on other data; draw random numbers from random, numpy.random or the framework, give "
                "the data set a method set_random_seed(seed), or accept it with data.nondeterministic: allow"
            )


def _nothing(seed: int) -> None:
    return None


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
