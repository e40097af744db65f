"""Random numbers from which start values are made, the same on every framework and every rank. Needs no framework."""

import zlib

import numpy as np


def generator_of(name: str, *, seed: int) -> np.random.Generator:
    """Return the generator of the start values of the array ``name``.

    Each array has one of its own, so that a model with one array more starts with the same values in all others.
    """
    # Not ``hash``, which Python salts anew in each process.
    return np.random.Generator(np.random.PCG64((seed, zlib.crc32(name.encode()))))
