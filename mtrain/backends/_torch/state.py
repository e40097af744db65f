"""A model and its optimizer as numpy arrays under neutral names, and back."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.collective import differing
from mtrain.core.errors import CheckpointError, TrainingError
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
    missing = [name for name in targets if name not in values]
    unknown = [name for name in values if name not in targets]
    unfit = [
        f"{name} {tuple(values[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in targets.items()
        if name in values and tuple(values[name].shape) != tuple(tensor.shape)
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", unfit))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the saved {what} do not fit this model: {'; '.join(problems)}; use the spec that they were saved with"
        )
    for name, tensor in targets.items():
        tensor.copy_(torch.from_numpy(np.array(values[name])))


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Digest of names and values, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(to_numpy(tensor).data)
    return digest.hexdigest()


def check_equal_start(model: nn.Module, collective: TorchCollective) -> None:
    """Every rank calls.

    Raises:
        TrainingError: some ranks hold other weights than rank 0; they are named.
    """
    if collective.size == 1:
        return
    ranks = differing(collective, fingerprint(model.state_dict()))
    if ranks:
        raise TrainingError(
            f"ranks {_listed(ranks)} start from other weights than rank 0; the model must be built from the seed alone "
            "and every rank must read the same file"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
