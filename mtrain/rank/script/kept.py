"""Save the state of a script's own objects in checkpoints, as plain values without code."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, Collective
from mtrain.data import trees
from mtrain.errors import ScriptError

LARGEST_BYTES = 16 * 1024 * 1024
"""Largest array that is kept. Larger state belongs into the model, whose arrays are stored in a format of their own."""
TAKEN = "numbers, text, None, arrays, tensors, and lists, tuples and dicts of these"
"""What a kept state may hold, for messages."""


def as_plain(value: Any, *, name: str) -> Any:
    """Return the result of a ``state_dict`` as values that JSON can hold.

    Raises:
        ScriptError: it holds something else than numbers, text, arrays and containers of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[as_plain(key, name=name), as_plain(item, name=name)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [as_plain(item, name=name) for item in value]}
    array = trees.as_array(value)
    if array is None or array.dtype == object:
        raise ScriptError(f"session.keep({name!r}): its state_dict() holds a {type(value).__name__}; expected {TAKEN}")
    if array.nbytes > LARGEST_BYTES:
        raise ScriptError(
            f"session.keep({name!r}): its state_dict() holds an array of {array.nbytes / 2**20:.0f} MiB; at most "
            f"{LARGEST_BYTES >> 20} MiB are kept: make it a buffer of the model"
        )
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    kind = "numpy" if isinstance(value, np.ndarray) else "scalar" if isinstance(value, np.generic) else "tensor"
    return {
        "array": [array.dtype.str, list(array.shape), content],
        "tensor": kind == "tensor",
        "scalar": kind == "scalar",
    }


def from_plain(value: Any, tensor: Callable[[Array], Any]) -> Any:
    """Return the value from which ``as_plain`` made ``value``; ``tensor`` turns an array into a tensor."""
    if not isinstance(value, Mapping):
        return value
    if "dict" in value:
        return {from_plain(key, tensor): from_plain(item, tensor) for key, item in value["dict"]}
    if "array" in value:
        dtype, shape, content = value["array"]
        array = np.frombuffer(base64.b64decode(content), dtype=np.dtype(dtype)).reshape(shape).copy()
        if value.get("scalar"):
            return array[()]
        return tensor(array) if value["tensor"] else array
    if "tuple" in value:
        return tuple(from_plain(item, tensor) for item in value["tuple"])
    return [from_plain(item, tensor) for item in value["list"]]


def check_alike(states: Mapping[str, Any], collective: Collective) -> None:
    """Refuse plain states that are not those of rank 0, which alone are saved; every rank must call.

    Raises:
        ScriptError: A rank has another state than rank 0, or one that rank 0 does not have; raised on every rank.
    """
    if collective.size == 1:
        return
    own = {name: hashlib.sha256(json.dumps(state).encode()).digest() for name, state in states.items()}
    first, *others = collective.all_gather(own)
    for rank, digests in enumerate(others, 1):
        for name in (name for name, digest in digests.items() if first.get(name) != digest):
            differs = "differs from that of rank 0" if name in first else "is kept, and rank 0 keeps none"
            raise ScriptError(
                f"session.keep: the state of {name!r} on rank {rank} {differs}, but a checkpoint holds that of rank 0 alone, for all "
                "ranks; keep what is equal on all ranks, and make what belongs to a rank's samples anew when the job is resumed"
            )
