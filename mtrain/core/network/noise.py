"""The random bits of a model's training, as a function of what they belong to and of nothing else.

A bit of ``nn.Dropout`` depends on (seed, update, the sample's place in the global batch, the layer's name, the element of
the sample): it is the same on every framework and device, for every number of ranks and micro batches, and after a resume.
Nothing is drawn from a generator, so there is no state to keep.

Bits come from a mixing function of 32-bit integers that is applied to a counter, as in Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3". The frameworks evaluate it with integer tensors; this module is their reference, and
makes the keys of samples. The function multiplies twice and shifts three times; its constants are from the search by
C. Wellons and T. Ettinger (github.com/skeeto/hash-prospector, public domain), of those the pair below 2**31.
"""

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from mtrain.core.interfaces import HostBatch, Loader, Tensor
from mtrain.core.samples.seeds import words_of

ROUNDS: Final = ((16, 0x21F0AAAD), (15, 0x735A2D97))
"""(shift, factor) of the steps ``x = (x ^ x >> shift) * factor`` modulo 2**32."""
LAST_SHIFT: Final = 15
"""Shift of the step ``x ^ x >> shift`` that ends the function."""
RANGE: Final = 2**31
"""Number of values of the bits that are compared with a probability; the sign bit is left out."""
BATCH_NAME: Final = "random_key"
"""Name of the samples' keys in a micro batch: int32 (B,)."""
SEEDED_TOGETHER: Final = 64
"""Updates whose seeds are computed at once."""
_Words = npt.NDArray[np.uint32]


def mix(x: npt.ArrayLike) -> _Words:
    """Return well mixed words; different words of uint32 stay different."""
    words = np.array(x, dtype=np.uint32)
    high = np.empty_like(words)
    for shift, factor in ROUNDS:
        np.right_shift(words, np.uint32(shift), out=high)
        words ^= high
        words *= np.uint32(factor)
    words ^= np.right_shift(words, np.uint32(LAST_SHIFT), out=high)
    return words


def sign(code: int) -> int:
    """Return the int32 that has the bits of a uint32."""
    return code - (1 << 32) if code >= 1 << 31 else code


def layer_code(name: str) -> int:
    """Return the uint32 that stands for a layer of that name."""
    return zlib.crc32(name.encode())


def threshold(p: float) -> int:
    """Return the smallest value of 31 bits that keeps an element, where ``p`` is the probability of dropping it."""
    return round(p * RANGE)


def shard_seed(seed: int, shard: int, update: int) -> int:
    """Return the seed of the framework's generators for one shard of an update, 63 bits.

    With accumulation, micro batch ``a`` of rank ``r`` is shard ``a * size + r``, so that the random numbers of a sample do not
    depend on which rank computes it.
    """
    block, place = divmod(update, SEEDED_TOGETHER)
    return int(_shard_seeds(seed, shard, block)[place])


@lru_cache(maxsize=64)
def _shard_seeds(seed: int, shard: int, block: int) -> npt.NDArray[np.uint64]:
    """Return the seeds of a shard for the updates of a block, because those of many cost little more than that of one."""
    updates = range(block * SEEDED_TOGETHER, (block + 1) * SEEDED_TOGETHER)
    seeds = [(low | high << 32) >> 1 for low, high, *_ in words_of((seed, shard), updates)]
    return np.array(seeds, dtype=np.uint64)  # A list of them is five times as large, and many blocks are kept.


def sample_keys(seed: int, update: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the key int32 (B,) of each sample.

    Args:
        seed: Seed of the job, of any size.
        update: Number of the update in the job, from 0; updates that were skipped count.
        places: Places of the samples in the global batch, int64 (B,).
    """
    # Seeds may be of any size; frameworks compute with one word of 32 bits.
    job = int(np.random.SeedSequence([seed, update]).generate_state(1, np.uint32)[0])
    return mix(mix(places) ^ np.uint32(job)).view(np.int32)


def kept_elements(keys_B: npt.NDArray[np.int32], name: str, count: int, p: float) -> npt.NDArray[np.bool_]:
    """Return which of the ``count`` elements of each sample ``nn.Dropout(p, name=name)`` keeps: bool (B, count)."""
    samples_B1 = mix(keys_B.view(np.uint32) ^ np.uint32(layer_code(name)))[:, None]
    words = mix(mix(np.arange(count, dtype=np.uint32)) ^ samples_B1)
    return np.asarray((words & np.uint32(RANGE - 1)) >= threshold(p))


def check_key(x: Tensor, random_key: Tensor | None) -> None:
    """Check that ``random_key`` has one key for each sample of ``x``.

    Raises:
        ValueError: it has not.
    """
    if random_key is None:
        raise ValueError('Dropout in training needs the keys of the samples: pass batch.get("random_key")')
    if tuple(random_key.shape) != (x.shape[0],):
        raise ValueError(
            f"Dropout: {tuple(random_key.shape)} keys for an input of shape {tuple(x.shape)}; expected one for each entry of "
            "its first axis"
        )


class KeyedLoader:
    """A loader whose micro batches have the keys of their samples, ``random_key``. Implements ``Loader``."""

    def __init__(self, loader: Loader, places: Sequence[npt.NDArray[np.int64]], *, seed: int) -> None:
        """Wrap ``loader``. ``places``: of each micro batch of an update, its samples' places in the global batch."""
        self.updates_per_epoch = loader.updates_per_epoch
        self._loader = loader
        self._places = places
        self._seed = seed

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """See ``Loader.micro_batches``."""
        batches = iter(self._loader.micro_batches(epoch, start))
        for position in range(start, self.updates_per_epoch):
            for places in self._places:
                update = epoch * self.updates_per_epoch + position
                yield {**next(batches), BATCH_NAME: sample_keys(self._seed, update, places)}

    def close(self) -> None:
        """See ``Loader.close``."""
        self._loader.close()
