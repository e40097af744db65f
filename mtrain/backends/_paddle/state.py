"""Convert a model and its optimizer to numpy arrays under neutral names, and back."""

from collections.abc import Mapping

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle import internals, ops
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.core.interfaces import Array
from mtrain.core.state import checks as state_checks


def to_numpy(tensor: Tensor) -> Array:
    """Copy a tensor to the host as a C-contiguous array; half precision becomes float32."""
    whole = tensor.astype("float32") if tensor.dtype == paddle.float16 else tensor
    return np.array(ops.to_numpy(whole), order="C", copy=True)


def arrays(model: Layer) -> dict[str, Array]:
    """Return copies of all parameters and persistent buffers by name."""
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


@paddle.no_grad()
def fill(targets: Mapping[str, Tensor], values: Mapping[str, Array], *, what: str) -> None:
    """Copy ``values`` into ``targets``, which keep their memory; both have the same names and shapes.

    Raises:
        CheckpointError: Names or shapes differ. The message counts all differences and names the first ones.
    """
    state_checks.check_fit({name: tuple(tensor.shape) for name, tensor in targets.items()}, values, what=what)
    for name, tensor in targets.items():
        paddle.assign(paddle.to_tensor(values[name]).astype(tensor.dtype), tensor)


def check_equal_start(model: Layer, collective: PaddleCollective) -> None:
    """Refuse to start if ranks hold different weights, see ``core.state.checks``; every rank must call."""
    if collective.size > 1:
        own = ((name, to_numpy(tensor)) for name, tensor in model.state_dict().items())
        state_checks.check_equal_start(collective, state_checks.fingerprint(own))


def inner(model: Layer) -> Layer:
    """Return the model that was built, without the layer that a backend wrapped around it."""
    return internals.unwrap(model)


def parameter_names(model: Layer) -> set[str]:
    """Return the names of parameters in the model's state."""
    # A tied weight has an entry of the state for each of its names, and one name among the parameters.
    return {name for name, _ in model.named_parameters()} | state_checks.aliases(model.state_dict()).keys()


def is_trained(parameter: Tensor) -> bool:
    """Return whether a parameter takes a gradient."""
    return not parameter.stop_gradient


def freeze(parameter: Tensor) -> None:
    """Let a parameter take no gradient."""
    parameter.stop_gradient = True
