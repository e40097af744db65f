"""Send the metrics of an update to the host, without waiting until the device has computed them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.interfaces import Array


def send(
    norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor], *, collective: TorchCollective
) -> Callable[[], Array]:
    """Start sending ``norm``, and the means over ranks of ``numbers`` and ``tensors``, to the host.

    Returns:
        A function that waits for them and returns them as one float64 vector.
    """
    device = norm.device
    parts = [_upload(numbers, device), *(tensor.detach().reshape(1).double() for tensor in tensors)]
    means = collective.all_reduce(torch.cat(parts), "mean")
    # The norm is equal on all ranks already; a mean of it could round.
    return _download(torch.cat([norm.reshape(1), means]))


def _upload(numbers: Sequence[float], device: torch.device) -> Tensor:
    on_cuda = device.type == "cuda"
    # From pageable memory the copy would wait until the device has come to it.
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=on_cuda).to(device, non_blocking=True)


def _download(vector: Tensor) -> Callable[[], Array]:
    if vector.device.type != "cuda":
        return vector.numpy
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Array:
        copied.synchronize()
        return host.numpy()

    return read
