"""Convert a model and its optimizer to numpy arrays under neutral names, and back."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.interfaces import Array
from mtrain.core.state import checks as state_checks


def to_numpy(tensor: Tensor) -> Array:
    """Copy a tensor to the host as a C-contiguous array; half precision becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    # `.cpu()` shares memory with a tensor that is on the CPU already, so the values must be copied.
    return np.array(tensor.cpu().numpy(), order="C", copy=True)


def on_host(tensor: Tensor) -> Array:
    """Return what ``to_numpy`` returns, but sharing memory with a tensor that is on the CPU where it can."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.asarray(tensor.cpu().numpy(), order="C")


def arrays(model: nn.Module) -> dict[str, Array]:
    """Return copies of all parameters and persistent buffers by name."""
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], values: Mapping[str, Array], *, what: str) -> None:
    """Copy ``values`` into ``targets``; both have the same names and shapes.

    Raises:
        CheckpointError: Names or shapes differ. The message counts all differences and names the first ones.
    """
    state_checks.check_fit({name: tuple(tensor.shape) for name, tensor in targets.items()}, values, what=what)
    for name, tensor in targets.items():
        tensor.copy_(torch.from_numpy(np.array(values[name])))


def check_equal_start(model: nn.Module, collective: TorchCollective) -> None:
    """Refuse to start if ranks hold different weights, see ``core.state.checks``; every rank must call."""
    if collective.size > 1:
        own = ((name, on_host(tensor)) for name, tensor in model.state_dict().items())
        state_checks.check_equal_start(collective, state_checks.fingerprint(own))


def inner(model: nn.Module) -> nn.Module:
    """Return the model that was built, without the module that a backend wrapped around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def parameter_names(model: nn.Module) -> set[str]:
    """Return the names of parameters in the model's state; a tied weight has several."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def is_trained(parameter: Tensor) -> bool:
    """Return whether a parameter takes a gradient."""
    return parameter.requires_grad


def freeze(parameter: Tensor) -> None:
    """Let a parameter take no gradient."""
    parameter.requires_grad = False
