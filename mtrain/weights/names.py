"""Translate names, shapes and types of arrays between mtrain's models and the files of other programs.

There are two layers of rules. The first are a framework's conventions, which follow from the kind of file: Paddle names
running statistics ``_mean`` and ``_variance``, keeps no count of batches and stores matrices as (in, out). The second
are a model's own, given by its ``published`` attribute (``core.interfaces.Published``).
"""

import re
from collections.abc import Mapping

import numpy as np

from mtrain.core.interfaces import Array, Published
from mtrain.errors import CheckpointError
from mtrain.weights.reading import Layout

_FROM_PADDLE = {"_mean": "running_mean", "_variance": "running_var"}
_TO_PADDLE = {neutral: paddle for paddle, neutral in _FROM_PADDLE.items()}
_COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of a module's arrays."""
COUNTER = "num_batches_tracked"
"""Last part of the names of BatchNorm's counters."""


def _with_leaf(name: str, leaves: Mapping[str, str]) -> str:
    stem, dot, leaf = name.rpartition(".")
    return stem + dot + leaves.get(leaf, leaf)


def neutral_names(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return ``arrays`` under neutral names, whichever framework named them.

    A ``module.`` before all names is removed, and ``_orig_mod.``, which a compiled module puts into names.

    Raises:
        CheckpointError: Two names of the file have the same neutral name.
    """
    plain = {name.replace(_COMPILED, ""): name for name in arrays}
    wrapped = all(name.startswith("module.") for name in plain)
    named = {
        _with_leaf(short.removeprefix("module.") if wrapped else short, _FROM_PADDLE): name
        for short, name in plain.items()
    }
    if len(named) != len(arrays):
        raise CheckpointError("two arrays of the file have the same meaning (running_mean and _mean, ...)")
    return {neutral: arrays[name] for neutral, name in named.items()}


def is_matrix(name: str, array: Array) -> bool:
    """Return whether an array is the weight of a linear layer, which Paddle stores transposed."""
    return array.ndim == 2 and name.rpartition(".")[2] == "weight"


def export(arrays: Mapping[str, Array], published: Published, *, layout: Layout) -> dict[str, Array]:
    """Convert neutral ``arrays`` to the names, shapes and types of the model's published files in ``layout``."""
    converted: dict[str, Array] = {}
    for name, array in arrays.items():
        if layout != "neutral" and any(re.search(pattern, name) for pattern in published.left_out):
            continue
        if layout != "neutral" and name in published.float32:
            array = array.astype(np.float32)
        if layout == "paddle":
            if name.rpartition(".")[2] == COUNTER:
                continue
            array = array.T if is_matrix(name, array) else array
            name = _with_leaf(name, _TO_PADDLE)
        converted[name] = array
    return converted
