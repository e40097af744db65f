"""Neutral layers: the contract that every framework's ``nn`` keeps. Parameter names and shapes are the ones given here.

Images are (B, C, H, W). Layers are native modules: ``torch.nn.Module`` or ``paddle.nn.Layer``. A layer's start values are
whatever the framework gives: a model's ``initial`` sets them.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from mtrain.core.interfaces import Array, Tensor

NAMES: Final[tuple[str, ...]]
"""Every name of this contract."""

class Module:
    """A layer with state. Attributes that are modules or parameters are registered; define ``forward``."""

    training: bool
    def __init__(self) -> None: ...
    def __call__(self, *inputs: Any) -> Any:
        """Run ``forward``."""

class Sequential(Module):
    """Layers one after the other; state names are ``0.``, ``1.``, ..."""

    def __init__(self, *layers: Module) -> None: ...

class ModuleList(Module):
    """A list of layers; state names are ``0.``, ``1.``, ..."""

    def __init__(self, modules: Iterable[Module]) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...

class Conv2d(Module):
    """Cross-correlation. ``weight`` (out, in / groups, kh, kw), ``bias`` (out); zeros outside the picture."""

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

class Linear(Module):
    """``x @ weight.T + bias``. ``weight`` (out, in), ``bias`` (out)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None: ...

class BatchNorm2d(Module):
    """Normalise each channel over the batch (training) or with running statistics (evaluation).

    ``running = (1 - momentum) * running + momentum * batch``. The running variance takes the unbiased estimate n / (n - 1) when
    ``unbiased_variance``, else the biased one; the normalisation itself always uses the biased one.
    State: ``weight``, ``bias``, ``running_mean``, ``running_var``, all (C), and ``num_batches_tracked`` (int64 scalar).
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *, unbiased_variance: bool = True
    ) -> None: ...

class LayerNorm(Module):
    """Normalise over the last axis, of size ``normalized_shape``. ``weight`` and ``bias`` of that size."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None: ...

class SiLU(Module):
    """``x * sigmoid(x)``, also called swish."""

    def __init__(self) -> None: ...

class ReLU(Module):
    """``max(x, 0)``."""

    def __init__(self) -> None: ...

class GELU(Module):
    """``x * Phi(x)`` with the exact normal distribution function."""

    def __init__(self) -> None: ...

class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def __init__(self) -> None: ...

class Identity(Module):
    """Returns what it is given; a place in a list that has no state."""

    def __init__(self) -> None: ...

class Upsample(Module):
    """Every pixel ``scale_factor`` times in both directions (nearest neighbour)."""

    def __init__(self, *, scale_factor: int) -> None: ...

class MaxPool2d(Module):
    """Largest value of each window; ``stride`` None: the kernel size. Padding never wins."""

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0) -> None: ...

def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> Tensor:
    """A float32 parameter to be assigned to an attribute of a module."""

def buffer(module: Module, name: str, array: Array, *, persistent: bool = True) -> None:
    """Register ``module.<name>``, a tensor without gradient; only a persistent one is part of the module's state."""

def no_grad() -> AbstractContextManager[None]:
    """What is computed inside carries no gradient."""
