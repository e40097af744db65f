"""Move the weights of a job by rounding errors, to see what training makes of them."""

from collections.abc import Mapping

import numpy as np

from mtrain.core.interfaces import Array


def nudge_weights(weights: Mapping[str, Array], names: set[str]) -> dict[str, Array]:
    """Return ``weights`` as float32, those in ``names`` one unit in the last place up or down; zeros stay zero."""
    result = {}
    for name, array in weights.items():
        values = np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else None)
        if name in names and values.dtype.kind == "f":
            up = np.random.default_rng([0, *name.encode()]).integers(0, 2, values.shape, dtype=np.int8)
            shifted = np.nextafter(values, np.where(up, np.inf, -np.inf).astype(np.float32))
            values = np.where(values == 0, values, shifted)
        result[name] = values.reshape(array.shape)
    return result
