"""A model and its optimizer as numpy arrays under neutral names, and back."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._torch.collective import TorchCollective
from mtrain.core import state_checks
from mtrain.core.interfaces import Array


def to_numpy(tensor: Tensor) -> Array:
    """A copy on the host, C-contiguous; half precision becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    # On CPU a plain copy of the values; from a device this is the download itself.
    return np.array(tensor.cpu().numpy(), order="C", copy=True)


def arrays(model: nn.Module) -> dict[str, Array]:
    """Parameters and persistent buffers by name."""
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], values: Mapping[str, Array], *, what: str) -> None:
    """Copy ``values`` into ``targets``; both have the same names and shapes.

    Raises:
        CheckpointError: they do not; every difference is counted, the first ones are named.
    """
    state_checks.check_fit({name: tuple(tensor.shape) for name, tensor in targets.items()}, values, what=what)
    for name, tensor in targets.items():
        tensor.copy_(torch.from_numpy(np.array(values[name])))


def check_equal_start(model: nn.Module, collective: TorchCollective) -> None:
    """Refuse to start when ranks hold different weights, see ``core.state_checks``; every rank calls."""
    if collective.size > 1:
        state_checks.check_equal_start(collective, state_checks.fingerprint(arrays(model)))
