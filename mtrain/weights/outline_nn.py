"""Neutral layers that consist of names, shapes and types only: enough to build a model and list its state.

They fulfil the contract of ``core/nn.pyi``, but compute nothing. Only the process of ``outline.py`` binds them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from mtrain.core.interfaces import Array
from mtrain.weights.matching import EntryType


class OutlinedTensor:
    """A stand-in for a tensor, with a shape and a type but without values."""

    def __init__(self, shape: tuple[int, ...], dtype: str, *, persistent: bool = True) -> None:
        self.type = EntryType(shape=tuple(shape), dtype=dtype)
        self.persistent = persistent


class Module:
    """A module that lists entries and submodules in order of assignment, own entries first, as state dicts do."""

    training = True

    def __init__(self) -> None:
        pass

    def state(self, prefix: str = "") -> Iterator[tuple[str, EntryType]]:
        """Yield every persistent entry with its neutral name."""
        members = list(vars(self).items())
        yield from ((prefix + name, e.type) for name, e in members if isinstance(e, OutlinedTensor) and e.persistent)
        for name, module in members:
            if isinstance(module, Module):
                yield from module.state(f"{prefix}{name}.")

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Yield every submodule with its name, as both frameworks do."""
        yield from ((name, member) for name, member in vars(self).items() if isinstance(member, Module))


class ModuleList(Module):
    """See ``core/nn.pyi``."""

    def __init__(self, modules: Iterable[Module]) -> None:
        super().__init__()
        vars(self).update({str(i): module for i, module in enumerate(modules)})

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())

    def __len__(self) -> int:
        return len(vars(self))

    def __getitem__(self, index: int) -> Any:
        return list(vars(self).values())[index]


class Sequential(ModuleList):
    """See ``core/nn.pyi``."""

    def __init__(self, *layers: Module) -> None:
        super().__init__(layers)


class _Affine(Module):
    """A layer with a weight and, if it has one, a bias."""

    def __init__(self, weight: tuple[int, ...], bias: int | None) -> None:
        super().__init__()
        self.weight = OutlinedTensor(weight, "float32")
        self.bias = None if bias is None else OutlinedTensor((bias,), "float32")


class Conv2d(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(  # noqa: PLR0913  # the contract's signature
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__((out_channels, in_channels // groups, *kernel), out_channels if bias else None)


class ConvTranspose2d(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(  # noqa: PLR0913  # the contract's signature
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002
        dilation: int | tuple[int, int] = 1,
    ) -> None:
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__((in_channels, out_channels // groups, *kernel), out_channels if bias else None)


class Linear(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:  # noqa: FBT001, FBT002
        super().__init__((out_features, in_features), out_features if bias else None)


class BatchNorm2d(Module):
    """See ``core/nn.pyi``."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        unbiased_variance: bool = True,
        silu: bool = False,
    ) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(self, name, OutlinedTensor((num_features,), "float32"))
        self.num_batches_tracked = OutlinedTensor((), "int64")


class LayerNorm(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__((normalized_shape,), normalized_shape)


class GroupNorm(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__((num_channels,), num_channels)


class Embedding(_Affine):
    """See ``core/nn.pyi``."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__((num_embeddings, embedding_dim), None)


class Stateless(Module):
    """A layer without state; it accepts any arguments."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


Dropout = GELU = Identity = MaxPool2d = ReLU = SiLU = Sigmoid = Upsample = Stateless
no_grad = nullcontext


def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> OutlinedTensor:
    """See ``core/nn.pyi``."""
    return OutlinedTensor(tuple(shape), "float32")


def buffer(module: Module, name: str, array: Array, *, persistent: bool = True) -> None:
    """See ``core/nn.pyi``."""
    setattr(module, name, OutlinedTensor(tuple(array.shape), str(array.dtype), persistent=persistent))


def frozen(module: Module, values: Callable[[Mapping[str, Array]], Mapping[str, Array]], *, like: Module) -> Module:
    """See ``core/nn.pyi``."""
    return module
