"""Seeds of many keys at once: the words that numpy's ``SeedSequence`` makes of each, to the last bit.

The algorithm is M. E. O'Neill's ``seed_seq`` (2015, "Developing a seed_seq alternative"), as numpy documents and promises
it. One call of numpy's class takes as long as everything else that is done to read a small sample.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint32]
POOL = 4
"""Words that a key is mixed into."""
LARGEST = 2**32 - 1
SHIFT = np.uint32(16)


def seed_host(value: int) -> None:
    """Seed the global generators of Python and numpy, which libraries for augmentation and a user's loop draw from."""
    random.seed(value)
    np.random.seed(value & LARGEST)


def words_of(prefix: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Return ``np.random.SeedSequence([*prefix, number]).generate_state(4)`` of each of ``numbers``, as integers."""
    key = [*prefix, 0]
    if len(key) > POOL or max([*prefix, *numbers], default=0) > LARGEST or min([*prefix, *numbers], default=0) < 0:
        return [np.random.SeedSequence([*prefix, number]).generate_state(POOL).tolist() for number in numbers]
    last = np.array(numbers, dtype=np.uint32)
    entropy = [np.full_like(last, word) for word in prefix] + [last]
    entropy += [np.zeros_like(last)] * (POOL - len(entropy))
    words: list[list[int]] = np.stack(list(_state(_pool(entropy))), axis=1).tolist()
    return words


def _constants(first: int, factor: int) -> Iterator[tuple[np.uint32, np.uint32]]:
    """Yield the pairs of words with which one value after another is hashed."""
    constant = first
    while True:
        following = constant * factor & LARGEST
        yield np.uint32(constant), np.uint32(following)
        constant = following


def _hash(values: _Words, constants: tuple[np.uint32, np.uint32]) -> _Words:
    values = (values ^ constants[0]) * constants[1]
    return values ^ values >> SHIFT


def _pool(entropy: Sequence[_Words]) -> list[_Words]:
    """Mix each word into every other one."""
    constants = _constants(0x43B0D7E5, 0x931E8875)
    pool = [_hash(words, next(constants)) for words in entropy]
    for source in range(POOL):
        for target in (place for place in range(POOL) if place != source):
            hashed = _hash(pool[source], next(constants))
            mixed = pool[target] * np.uint32(0xCA01F9DD) - hashed * np.uint32(0x4973F715)
            pool[target] = mixed ^ mixed >> SHIFT
    return pool


def _state(pool: Sequence[_Words]) -> Iterator[_Words]:
    constants = _constants(0x8B51F9DD, 0x58F38DED)
    for words in pool:
        yield _hash(words, next(constants))
