"""The layers that every framework's ``nn`` must provide, with exactly these parameter names and shapes.

Images are (B, C, H, W). Layers are native modules: ``torch.nn.Module`` or ``paddle.nn.Layer``. The start values of a
new layer depend on the framework and do not matter, because a model's ``initial`` replaces them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

from mtrain.core.interfaces import Array, Tensor

NAMES: Final[tuple[str, ...]]
"""The name of every class and function of this module."""

class Module:
    """Base class of layers. Attributes that are modules or parameters are registered; subclasses define ``forward``."""

    training: bool
    def __init__(self) -> None: ...
    def __call__(self, *inputs: Any) -> Any:
        """Run ``forward``."""

class Sequential(Module):
    """Applies layers one after the other. Names in its state begin with ``0.``, ``1.``, ..."""

    def __init__(self, *layers: Module) -> None: ...

class ModuleList(Module):
    """Holds a list of layers. Names in its state begin with ``0.``, ``1.``, ..."""

    def __init__(self, modules: Iterable[Module]) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...

class Conv2d(Module):
    """2-D cross-correlation with zero padding. ``weight`` (out, in / groups, kh, kw), ``bias`` (out)."""

    weight: Tensor
    bias: Tensor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None: ...

class ConvTranspose2d(Module):
    """Transpose of a 2-D convolution. ``weight`` (in, out / groups, kh, kw), ``bias`` (out).

    The output has ``(H - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1`` rows.
    """

    weight: Tensor
    bias: Tensor
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
    ) -> None: ...

class Linear(Module):
    """``x @ weight.T + bias``. ``weight`` (out, in), ``bias`` (out)."""

    weight: Tensor
    bias: Tensor
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None: ...

class BatchNorm2d(Module):
    """Normalises each channel by the statistics of the batch (training) or by running statistics (evaluation).

    ``running = (1 - momentum) * running + momentum * batch``. With ``unbiased_variance`` the running variance is
    updated by the unbiased estimate, factor n / (n - 1), otherwise by the biased one; the normalisation always uses the
    biased one. With ``silu`` the layer's output is SiLU of that, which a backend may compute in the same pass. State:
    ``weight``, ``bias``, ``running_mean``, ``running_var``, all (C), and ``num_batches_tracked`` (int64 scalar).
    """

    weight: Tensor
    bias: Tensor
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        unbiased_variance: bool = True,
        silu: bool = False,
    ) -> None: ...

class LayerNorm(Module):
    """Normalises over the last axis, which has size ``normalized_shape``, as have ``weight`` and ``bias``."""

    weight: Tensor
    bias: Tensor
    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None: ...

class GroupNorm(Module):
    """Normalises each of ``num_groups`` groups of channels of each sample by its own statistics, (B, C, H, W).

    ``weight`` and ``bias`` (C). The variance is the biased one. Wu and He 2018.
    """

    weight: Tensor
    bias: Tensor
    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None: ...

class Embedding(Module):
    """Looks up rows of ``weight`` (num_embeddings, embedding_dim) by int64 indices of any shape."""

    weight: Tensor
    def __init__(self, num_embeddings: int, embedding_dim: int) -> None: ...

class Dropout(Module):
    """In training sets elements to 0 with probability ``p``, below 1, and divides the others by ``1 - p``.

    ``layer(x, random_key)`` takes the keys of the samples, ``batch.get("random_key")`` int32 (B,), where B is the first axis
    of ``x``. Which elements are dropped depends on the key, on ``name`` and on the element's place in its sample alone, so
    it is the same on every framework and for every number of ranks: see ``core.network.noise``. Give each layer of a network a
    name of its own. In evaluation and with ``p`` 0 the input itself is returned, and the key may be None.

    Raises (from a call in training with ``p`` > 0):
        ValueError: the key is None, or has another number of samples than ``x``.
    """

    def __init__(self, p: float = 0.5, *, name: str) -> None: ...

class SiLU(Module):
    """``x * sigmoid(x)``, also called swish."""

    def __init__(self) -> None: ...

class ReLU(Module):
    """``max(x, 0)``."""

    def __init__(self) -> None: ...

class GELU(Module):
    """``x * Phi(x)``, see ``ops.gelu``."""

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None: ...

class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def __init__(self) -> None: ...

class Identity(Module):
    """Returns its input. It is used as a placeholder without state in a list of layers."""

    def __init__(self) -> None: ...

class Upsample(Module):
    """Repeats every pixel ``scale_factor`` times in both directions (nearest neighbour)."""

    def __init__(self, *, scale_factor: int) -> None: ...

class MaxPool2d(Module):
    """Largest value of each window. ``stride`` None: the kernel size. Padding counts as minus infinity."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0) -> None: ...

def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> Tensor:
    """Create a float32 parameter filled with ``fill``, to be assigned to an attribute of a module."""

def buffer(module: Module, name: str, array: Array, *, persistent: bool = True) -> None:
    """Register a tensor without gradient as ``module.<name>``. Only a persistent one is part of the module's state."""

def no_grad() -> AbstractContextManager[None]:
    """Return a context in which results carry no gradient."""

def frozen(module: Module, values: Callable[[Mapping[str, Array]], Mapping[str, Array]], *, like: Module) -> Module:
    """Return ``module`` with new values, in evaluation mode and without gradients.

    ``values`` receives the module's whole state by neutral name and returns the new one, with the same names and shapes. The
    module moves to the device of the module ``like``, and its floating values take the type of that module's.

    Raises:
        CheckpointError: names or shapes differ.
    """
