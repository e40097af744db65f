"""Read samples from any object that has a length and items, with random numbers that (seed, epoch, index) determine."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtrain.data import trees

Seed = Callable[[int], None]
"""Seeds the framework's random generators."""
CHECKED_SAMPLES = 3
"""Samples that are read twice at the start, to find random numbers that the seeds do not determine."""


def seeded_sample(dataset: Any, index: int, key: Sequence[int], seed_framework: Seed) -> Any:
    """Return sample ``index`` of a data set, read with the random numbers that ``key`` determines."""
    seed_everything(dataset, key, seed_framework)
    return dataset[index]


def seed_everything(dataset: Any, key: Sequence[int], seed_framework: Seed) -> None:
    """Seed the generators of Python, numpy, the framework and, if it has one, of the data set by ``key``."""
    seed_by(np.random.SeedSequence(list(key)).generate_state(4).tolist(), dataset, seed_framework)


def seed_by(words: Sequence[int], dataset: Any, seed_framework: Seed) -> None:
    """Seed the same generators by four words of 32 bits."""
    random.seed(words[0])
    np.random.seed(words[1])  # augmentation libraries use numpy's global generator
    seed_framework(words[2])
    if hasattr(dataset, "set_random_seed"):
        dataset.set_random_seed(words[3])


def first_unrepeatable(sample: Callable[[int], Any], length: int) -> int | None:
    """Return the number of the first checked sample that differs when ``sample`` reads it twice; None if none does."""
    for index in range(min(CHECKED_SAMPLES, length)):
        if not trees.equal(sample(index), sample(index)):
            return index
    return None


def unusable(dataset: Any) -> str:
    """Return why an object cannot be used as a data set; an empty text if it can."""
    for method, meaning in (("__len__", "a length"), ("__getitem__", "items by number")):
        if not hasattr(dataset, method):
            return (
                f"the data set, a {type(dataset).__name__}, has no {method}; expected an object with {meaning} "
                "(a stream without a length has to be written to files, or into a list, first)"
            )
    return ""


def is_module(value: Any) -> bool:
    """Return whether ``value`` is a module of torch or Paddle, without importing either."""
    # A class of modules has these members too, and is a function that builds one.
    return not isinstance(value, type) and hasattr(value, "named_parameters") and hasattr(value, "state_dict")
