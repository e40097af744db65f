"""Names, shapes and types between a model here and the files of others: pure functions on names and arrays.

Two layers of rules. A framework's habits, by the kind of file: Paddle calls running statistics ``_mean`` and ``_variance``, keeps no
count of batches and writes matrices as (in, out). A model's own, by its ``published`` attribute (``core.interfaces.Published``).
"""

import re
from collections.abc import Mapping

import numpy as np

from mtrain.core.interfaces import Array, Published
from mtrain.errors import CheckpointError
from mtrain.weights.reading import Layout

_FROM_PADDLE = {"_mean": "running_mean", "_variance": "running_var"}
_TO_PADDLE = {neutral: paddle for paddle, neutral in _FROM_PADDLE.items()}
COUNTER = "num_batches_tracked"
"""Last part of the names of BatchNorm's counters."""


def published_of(plugin: object) -> Published:
    """What a model plugin says of its published files; nothing: they are as here."""
    told = getattr(plugin, "published", None)
    return told if isinstance(told, Published) else Published()


def _with_leaf(name: str, leaves: Mapping[str, str]) -> str:
    stem, dot, leaf = name.rpartition(".")
    return stem + dot + leaves.get(leaf, leaf)


def neutral_names(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """``arrays`` under neutral names, whichever framework spelled them; a ``module.`` that wraps all names is taken off.

    Raises:
        CheckpointError: two names of the file mean the same.
    """
    wrapped = all(name.startswith("module.") for name in arrays)
    named = {_with_leaf(name.removeprefix("module.") if wrapped else name, _FROM_PADDLE): name for name in arrays}
    if len(named) != len(arrays):
        raise CheckpointError("two arrays of the file have the same meaning (running_mean and _mean, ...)")
    return {neutral: arrays[name] for neutral, name in named.items()}


def is_matrix(name: str, array: Array) -> bool:
    """Whether Paddle stores it transposed: the weight of a linear layer."""
    return array.ndim == 2 and name.rpartition(".")[2] == "weight"


def exported(arrays: Mapping[str, Array], published: Published, *, layout: Layout) -> dict[str, Array]:
    """Neutral ``arrays`` as the published files of this model have them: names, shapes, types."""
    made: dict[str, Array] = {}
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
        made[name] = array
    return made
