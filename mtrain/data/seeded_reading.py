"""Read the samples of a training epoch, each with the random numbers that (seed, epoch, number) determine.

Most data sets draw nothing: their generators are seeded once for a whole batch.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtrain.core.samples import seeds
from mtrain.data.objects import Seed, seed_by

SEEDED_TOGETHER = 256
"""Samples whose seeds are computed at once."""
WORTH_CHECKING = 4
"""Samples of a batch from which on this takes less time than to seed for each sample."""
PROBE = (1_234_567, 2_345_678, 3_456_789, 4_567_890)
"""The words by which a batch is seeded whose samples are expected to draw nothing."""


class SeededReader:
    """Reads samples by number: ``index + k * length`` is repetition ``k`` (from 0) of sample ``index`` within an epoch."""

    def __init__(self, dataset: Any, *, seed: int, seed_framework: Seed) -> None:
        self._dataset = dataset
        self._seed = seed
        self._seed_framework = seed_framework
        self._drew = False
        """Whether a sample has drawn random numbers."""
        self._last: Sequence[int] = PROBE
        """The words by which the last call of ``sample`` has seeded."""
        self._untouched: tuple[Any, ...] | None = None
        """What generators draw after they were seeded by ``PROBE``; None: every sample is seeded."""

    def batches(self, epoch: int, batches: Iterable[Sequence[int]]) -> Iterator[list[Any]]:
        """Yield the samples of each batch, given as numbers."""
        for some in _several(batches):
            words = iter(seeds.words_of((self._seed, epoch), [number for numbers in some for number in numbers]))
            for numbers in some:
                yield self._read(numbers, [next(words) for _ in numbers])

    def sample(self, epoch: int, number: int) -> Any:
        """Return one sample, and take note whether it has drawn random numbers."""
        (words,) = seeds.words_of((self._seed, epoch), [number])
        self._last = words
        seed_by(words, self._dataset, self._seed_framework)
        before = _generators()
        sample = self._dataset[number % len(self._dataset)]
        self._drew = self._drew or before is None or before != _generators()
        return sample

    def trust(self) -> None:
        """Expect from now on that samples draw nothing, if no call of ``sample`` has."""
        if not self._drew and not hasattr(self._dataset, "set_random_seed"):
            seed_by(PROBE, self._dataset, self._seed_framework)
            self._untouched = _draw_next()
            seed_by(self._last, self._dataset, self._seed_framework)

    def _read(self, numbers: Sequence[int], words: Sequence[Sequence[int]]) -> list[Any]:
        if self._untouched is not None and len(numbers) >= WORTH_CHECKING:
            # Seeding three generators takes longer than reading a small sample. If they draw
            # after the batch what the probe makes them draw first, no sample has drawn anything;
            # otherwise the batch is read again, and every sample is seeded from then on.
            samples = self._read_together(numbers)
            if samples is not None:
                # What is drawn between this batch and the next one repeats, too.
                seed_by(words[-1], self._dataset, self._seed_framework)
                return samples
            self._untouched = None
        length, samples = len(self._dataset), []
        for number, own in zip(numbers, words, strict=True):
            seed_by(own, self._dataset, self._seed_framework)
            samples.append(self._dataset[number % length])
        return samples

    def _read_together(self, numbers: Sequence[int]) -> list[Any] | None:
        """Return the samples; None: one of them has drawn random numbers."""
        length = len(self._dataset)
        seed_by(PROBE, self._dataset, self._seed_framework)
        try:
            samples = [self._dataset[number % length] for number in numbers]
        except Exception:
            if self._untouched == _draw_next():
                raise
            return None
        return samples if self._untouched == _draw_next() else None


def _generators() -> tuple[Any, ...] | None:
    """Return the states of all generators; None: there are others than those of Python, numpy and torch on the CPU."""
    torch = sys.modules.get("torch")
    if "paddle" in sys.modules or (torch is not None and torch.cuda.is_initialized()):
        return None
    kind, words, *numpys = np.random.get_state()
    return random.getstate(), kind, np.asarray(words).tobytes(), numpys, _torchs_state()


def _draw_next() -> tuple[Any, ...] | None:
    """Return what the generators draw next, or their state where that takes less time; None as for ``_generators``."""
    if "paddle" in sys.modules:
        return None
    return random.getrandbits(128), np.random.random_sample(), np.random.random_sample(), _torchs_state()


def _torchs_state() -> bytes | None:
    torch = sys.modules.get("torch")
    return None if torch is None else bytes(torch.default_generator.get_state().numpy())


def _several(batches: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the batches in lists of some hundred samples, because seeds of many samples cost no more than those of a few."""
    some: list[Sequence[int]] = []
    count = 0
    for numbers in batches:
        some.append(numbers)
        count += len(numbers)
        if count >= SEEDED_TOGETHER:
            yield some
            some, count = [], 0
    if some:
        yield some
