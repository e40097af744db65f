"""The arrays of a Paddle training under the names and in the layouts that torch has, so that both stacks can be compared.

A digest depends on the name and on the order of the elements. So weights of ``Linear`` are read transposed (Paddle keeps
inputs by outputs), BatchNorm's ``_mean`` and ``_variance`` are called ``running_mean`` and ``running_var``, and what an
optimizer keeps has the name that torch's optimizer gives it. All else has the name that the model gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from mtrain_trace import mixing, naming

STATISTICS = {"_mean": "running_mean", "_variance": "running_var"}
"""What Paddle's BatchNorm calls its statistics, which it keeps as parameters that are not trained."""
MOMENTS = {
    "velocity": "momentum_buffer",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moment2_max": "max_exp_avg_sq",
    "moment": "sum",
    "mean_square": "square_avg",
    "mean_grad": "grad_avg",
    "momentum": "momentum_buffer",
}
"""Names of torch for what Paddle's optimizers keep for each parameter."""
WRAPPER = "_layers."
"""What DataParallel and Fleet's wrappers put in front of the names of parameters."""


@dataclass
class Names:
    """How the arrays of the models are called, and which of them are read transposed."""

    parameters: dict[int, str] = field(default_factory=dict)
    """Names by the identity of the parameters."""
    transposed: set[int] = field(default_factory=set)
    statistics: list[tuple[str, Any]] = field(default_factory=list)
    """Statistics and other buffers of floating point numbers."""


def names_of(roots: list[Any]) -> Names:
    """Return how the arrays of all models that have been called are named."""
    found = Names()
    for place, root in enumerate(roots):
        front = f"model{place}." if len(roots) > 1 else ""
        kept = {id(part[key]): name for part, key, name in _statistics_of(root)}
        listed = [(_plain(name), parameter) for name, parameter in root.named_parameters()]
        cut = naming.common_front([name for name, parameter in listed if id(parameter) not in kept])
        for name, parameter in listed:
            if id(parameter) in kept:
                owner = name[cut:].rpartition(".")[0]
                found.statistics.append((front + (f"{owner}." if owner else "") + kept[id(parameter)], parameter))
            else:
                found.parameters.setdefault(id(parameter), front + name[cut:])
        for name, buffer in root.named_buffers():
            if buffer.dtype in (paddle.float32, paddle.float64):
                found.statistics.append((front + _plain(name)[cut:], buffer))
        for part in root.sublayers(include_self=True):
            if isinstance(part, paddle.nn.Linear):
                found.transposed.add(id(part.weight))
    return found


def _statistics_of(root: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (parameters of a layer, key, name of torch) of all statistics of BatchNorm."""
    for part in root.sublayers(include_self=True):
        for key, name in STATISTICS.items():
            if key in part._parameters and part._parameters[key] is not None:
                yield part._parameters, key, name


def _plain(name: str) -> str:
    """Return a parameter's name without the parts that wrappers put in front."""
    while name.startswith(WRAPPER):
        name = name[len(WRAPPER) :]
    return name


def on_host(tensor: Any, *, transposed: bool = False) -> Any:
    """Return a tensor as an array of numpy in torch's layout; bfloat16 comes as its 16 bits (int16)."""
    array = tensor.detach().numpy()
    if tensor.dtype == paddle.bfloat16:
        # numpy has no bfloat16: bits are compared as integers, and values are made of them below.
        array = array.view(np.int16)
    return np.ascontiguousarray(array.T) if transposed and array.ndim == 2 else array


def values_of(array: Any, dtype: Any) -> Any:
    """Return the values of an array that ``on_host`` has returned, of floating point numbers that numpy knows."""
    if dtype == paddle.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def measure(name: str, tensor: Any, *, transposed: bool = False) -> list[Any]:
    """Return [digest, squared length, sketch] of a tensor, as the lines of a trace hold them."""
    array = on_host(tensor, transposed=transposed)
    values = values_of(array, tensor.dtype)
    flat = values.reshape(-1).astype(np.float64)
    sketch = [float(f"{value:.9g}") for value in mixing.sketch(values, name)]
    return [mixing.as_hex(mixing.digest(array, name)), float(flat @ flat), sketch]


def square(tensor: Any) -> float:
    """Return the squared length of a tensor, summed in float64."""
    flat = values_of(on_host(tensor), tensor.dtype).reshape(-1).astype(np.float64)
    return float(flat @ flat)


def rows(tensor: Any, seed: int) -> Any:
    """Return a digest of each row of a tensor, int64 of shape (rows,), as ``torch_mixing.rows`` computes it."""
    return mixing.rows(on_host(tensor), seed, is_real=tensor.dtype == paddle.bfloat16)
