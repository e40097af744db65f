"""Arrays on the host, tensors on the device, and the micro batches that are made of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:  # numpy takes 0.1 s to import, and `mtrain plan` needs these names only
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
else:
    Array = Any
T = TypeVar("T")
Tensor: TypeAlias = Any
"""A tensor of the framework that this process has bound (see ``core.binding``)."""
Module: TypeAlias = Any
"""A native module of the framework that this process has bound: ``torch.nn.Module`` or ``paddle.nn.Layer``."""
HostBatch: TypeAlias = Mapping[str, Array]
"""One micro batch as numpy arrays in host memory, as a loader yields it."""
Batch: TypeAlias = Mapping[str, Tensor]
"""One micro batch as tensors on the device, as a model receives it."""
Precision: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]
