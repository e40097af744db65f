"""Check that saved arrays fit a model, and that all ranks start from the same arrays."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mtrain.core.collective import differing
from mtrain.core.interfaces import Array, Collective
from mtrain.errors import CheckpointError, TrainingError, first_few

Shape = tuple[int, ...]


def check_fit(shapes: Mapping[str, Shape], values: Mapping[str, Array], *, what: str) -> None:
    """Compare the names and shapes of a model's tensors with those of saved arrays.

    Raises:
        CheckpointError: they differ; the message counts all differences and names the first ones.
    """
    missing = [name for name in shapes if name not in values]
    unknown = [name for name in values if name not in shapes]
    known: Mapping[str, Shape] | None = getattr(values, "shapes", None)  # of arrays that have to be read or drawn
    saved_shapes = {
        name: tuple(values[name].shape) if known is None else known[name] for name in shapes if name in values
    }
    unfit = [
        f"{name} {shape}, expected {shapes[name]}" for name, shape in saved_shapes.items() if shape != shapes[name]
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", unfit))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the saved {what} do not fit this model: {'; '.join(problems)}; use the spec that they were saved with"
        )


class Fingerprint:
    """A digest of names and values, which differs if any bit does."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, array: Array) -> None:
        """Take an array in."""
        self._digest.update(name.encode())
        self._digest.update(np.asarray(array, order="C").data)

    @property
    def digest(self) -> str:
        """The digest of all arrays so far, in their order."""
        return self._digest.hexdigest()


def fingerprint(arrays: Iterable[tuple[str, Array]]) -> str:
    """Return the digest of arrays, of which one is held at a time."""
    taken = Fingerprint()
    for name, array in arrays:
        taken.add(name, array)
    return taken.digest


def check_equal_start(collective: Collective, own: str) -> None:
    """Compare the ``fingerprint`` of this rank with those of the other ranks. Every rank must call.

    Raises:
        TrainingError: some ranks hold other weights than rank 0; the message names them.
    """
    ranks = differing(collective, own)
    if ranks:
        raise TrainingError(
            f"ranks {first_few(ranks, 8)} start from other weights than rank 0; the model must be built from the seed alone "
            "and every rank must read the same file"
        )


def aliases(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the further names of tied tensors: alias -> first name. ``entries``: all tensors of a model by name."""
    first_names: dict[int, str] = {}
    return {
        name: first for name, tensor in entries.items() if (first := first_names.setdefault(id(tensor), name)) != name
    }
