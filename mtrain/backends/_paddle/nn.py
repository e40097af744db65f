"""The neutral layers on Paddle. ``core/nn.pyi`` is their contract; Paddle's own class is used where it fulfils it."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, cast

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Identity, Layer, ReLU, Sigmoid  # noqa: F401 - some are layers of the contract
from paddle.nn import MaxPool2D as MaxPool2d  # noqa: F401
from paddle.nn import Silu as SiLU  # noqa: F401
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Uniform

from mtrain.backends._paddle import dropout, internals, kernels, ops, paddle2_compatibility, state
from mtrain.core.interfaces import Array
from mtrain.core.network import noise
from mtrain.core.overriding import override

no_grad = paddle.no_grad
_REDUCED = (0, 2, 3)


class Module(Layer):
    """A layer whose ``to`` converts floating types only, unlike Paddle's: counters and labels stay integers."""

    @override
    def to(self, device: Any = None, dtype: Any = None, blocking: Any = None, non_blocking: Any = None) -> Self:
        # Paddle 2.6 has no `non_blocking`, so it is passed on only if it was given.
        extra = {} if non_blocking is None else {"non_blocking": non_blocking}
        internals.convert_floats(self, device=device, dtype=dtype, blocking=blocking, **extra)
        return self


class Sequential(Module, paddle.nn.Sequential):
    """Paddle's Sequential, with the ``to`` of ``Module``."""


class ModuleList(Module, paddle.nn.LayerList):
    """Paddle's LayerList, with the neutral signature."""

    def __init__(self, modules: Iterable[Layer]) -> None:
        super().__init__(list(modules))


class Conv2d(paddle.nn.Conv2D):
    """Paddle's Conv2D, with the neutral signature."""

    def __init__(  # noqa: PLR0913  # the contract's signature
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002  # the contract's
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias_attr=None if bias else False,
        )
        self.geometry = (stride, padding, dilation, groups)


class ConvTranspose2d(paddle.nn.Conv2DTranspose):
    """Paddle's Conv2DTranspose, with the neutral signature."""

    def __init__(  # noqa: PLR0913  # the contract's signature
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002  # the contract's
        dilation: int | tuple[int, int] = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            bias_attr=None if bias else False,
        )


class Linear(Layer):
    """A linear layer with a weight of shape (out, in), where Paddle's own has (in, out)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:  # noqa: FBT001, FBT002  # the contract's
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        initializer = Uniform(-bound, bound)
        self.weight = self.create_parameter([out_features, in_features], default_initializer=initializer)
        self.bias = self.create_parameter([out_features], default_initializer=initializer) if bias else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return what the layer computes for ``x``, with ``weight`` in place of its own."""
        y = paddle.matmul(x, weight, transpose_y=True)
        return y if self.bias is None else y + self.bias


class BatchNorm2d(Module):
    """BatchNorm2d with the neutral names, a choice of variance estimate, and an exact epsilon in float64.

    Paddle's own layer has other names, always uses the biased variance, and rounds momentum and epsilon to float32. Its
    kernel normalises float32 and half types here, or mtrain's own where ``kernels`` is set; float64 is composed of single
    operations.
    """

    kernels = False
    """Whether ``_paddle.kernels`` computes training where it can; see ``syncbn.use_kernels``."""

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
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.unbiased_variance = unbiased_variance
        self.silu = silu
        self.weight = self.create_parameter([num_features], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([num_features], is_bias=True)
        self.register_buffer("running_mean", paddle.zeros([num_features]))
        self.register_buffer("running_var", paddle.ones([num_features]))
        self.register_buffer("num_batches_tracked", paddle.zeros([], paddle.int64))

    @override
    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.kernels and self.training and kernels.fit(x_BCHW, self.weight):
            return self._by_kernels(x_BCHW)
        y_BCHW = self.normalize_batch(x_BCHW)
        return F.silu(y_BCHW) if self.silu else y_BCHW

    def _by_kernels(self, x_BCHW: Tensor) -> Tensor:
        """Normalise in training, with SiLU where the layer has it."""
        running = kernels.Running(self.running_mean, self.running_var, self.momentum, self._correction(_count(x_BCHW)))
        paddle.increment(self.num_batches_tracked)
        return kernels.normalize(x_BCHW, self.weight, self.bias, eps=self.eps, silu=self.silu, running=running)

    def _correction(self, count: int) -> float:
        return count / (count - 1) if self.unbiased_variance else 1.0

    def normalize_batch(self, x_BCHW: Tensor) -> Tensor:
        """Normalise without SiLU."""
        if x_BCHW.dtype == paddle.float64:
            return self._exact(x_BCHW)
        if not self.training:
            return self._kernel(x_BCHW, self.running_mean, self.running_var)
        mean_C, var_C = self.running_mean.clone(), self.running_var.clone()  # the kernel overwrites these
        y_BCHW = self._kernel(x_BCHW, mean_C, var_C)
        if x_BCHW.place.is_gpu_place():  # there the chosen kernel decides whether the variance returned is biased
            mean_C, var_C = (x.flatten() for x in _moments(x_BCHW.detach().astype(mean_C.dtype)))
        self.track(mean_C, var_C, _count(x_BCHW))
        return y_BCHW

    def track(self, mean_C: Tensor, var_C: Tensor, count: int) -> None:
        """Move the running statistics towards those of a batch, in place.

        Args:
            mean_C: Mean of the batch.
            var_C: Biased variance of the batch.
            count: Number of values per channel in the batch.
        """
        keep, take = 1 - self.momentum, self.momentum
        self.running_mean.scale_(keep).add_(mean_C.detach() * take)
        self.running_var.scale_(keep).add_(var_C.detach() * (take * self._correction(count)))
        paddle.increment(self.num_batches_tracked)

    def _kernel(self, x_BCHW: Tensor, mean_C: Tensor, var_C: Tensor) -> Tensor:
        """Call Paddle's kernel. In training its momentum of 0 overwrites ``mean_C`` and ``var_C`` with the batch's."""
        return F.batch_norm(
            x_BCHW, mean_C, var_C, self.weight, self.bias, training=self.training, momentum=0.0, epsilon=self.eps
        )

    def _exact(self, x_BCHW: Tensor) -> Tensor:
        """Normalise by single operations, with epsilon in the dtype of the input."""
        mean_C11, var_C11 = _planes(self.running_mean), _planes(self.running_var)
        if self.training:
            mean_C11, var_C11 = _moments(x_BCHW)
            self.track(mean_C11.flatten(), var_C11.flatten(), _count(x_BCHW))
        scale_C11 = _planes(self.weight) * paddle.rsqrt(var_C11 + paddle.to_tensor(self.eps, x_BCHW.dtype))
        return (x_BCHW - mean_C11) * scale_C11 + _planes(self.bias)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, unbiased_variance={self.unbiased_variance}"
        )


class LayerNorm(Layer):
    """LayerNorm composed of single operations in float64, where Paddle's kernel would round epsilon to float32."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalized_shape = normalized_shape
        self.eps = eps
        self.weight = self.create_parameter([normalized_shape], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([normalized_shape], is_bias=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != paddle.float64:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        centred = x - paddle.mean(x, -1, keepdim=True)
        variance = paddle.mean(paddle.square(centred), -1, keepdim=True)
        return centred * paddle.rsqrt(variance + paddle.to_tensor(self.eps, x.dtype)) * self.weight + self.bias


class GroupNorm(Layer):
    """GroupNorm composed of single operations in float64, where Paddle's kernel would round epsilon to float32."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.eps = eps
        self.weight = self.create_parameter([num_channels], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([num_channels], is_bias=True)

    @override
    def forward(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.dtype != paddle.float64:
            return F.group_norm(x_BCHW, self.num_groups, self.eps, self.weight, self.bias)
        x_BGN = paddle.reshape(x_BCHW, (x_BCHW.shape[0], self.num_groups, -1))
        centred = x_BGN - paddle.mean(x_BGN, -1, keepdim=True)
        variance = paddle.mean(paddle.square(centred), -1, keepdim=True)
        normal = centred * paddle.rsqrt(variance + paddle.to_tensor(self.eps, x_BCHW.dtype))
        return paddle.reshape(normal, x_BCHW.shape) * _planes(self.weight) + _planes(self.bias)


class Embedding(paddle.nn.Embedding):
    """Paddle's Embedding, with the neutral signature."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)


class Upsample(Layer):
    """Nearest neighbours, with the neutral signature."""

    def __init__(self, *, scale_factor: int) -> None:
        super().__init__()
        self.scale_factor = scale_factor

    @override
    def forward(self, x: Tensor) -> Tensor:
        return ops.upsample_nearest(x, self.scale_factor)


class GELU(Layer):
    """GELU, with the neutral signature."""

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate == "tanh")


class Dropout(Layer):
    """See ``core/nn.pyi``; the words are those of ``core.network.noise``, computed with int32, which wraps around as uint32 does."""

    def __init__(self, p: float = 0.5, *, name: str) -> None:
        super().__init__()
        self.p = p
        self.name = name

    @override
    def forward(self, x: Tensor, random_key: Tensor | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        noise.check_key(x, random_key)
        assert random_key is not None
        if dropout.fits(x):
            return cast(Tensor, dropout.Function.apply(x, random_key=random_key, layer=self))
        count = math.prod(x.shape[1:])
        # On the CPU numpy takes a tenth of the time, since it works in place.
        on_cpu = x.place.is_cpu_place()
        kept = self.kept_by_numpy(random_key, count) if on_cpu else self.kept_by_tensors(random_key, count)
        mask = paddle.reshape(kept, x.shape).astype(x.dtype)
        return x * (mask * paddle.to_tensor(1 / (1 - self.p), x.dtype))

    def kept_by_numpy(self, random_key: Tensor, count: int) -> Tensor:
        """Return which of the ``count`` elements of each sample are kept, bool (B, count), computed on the host."""
        return paddle.to_tensor(
            noise.kept_elements(random_key.numpy(), self.name, count, self.p), place=random_key.place
        )

    def kept_by_tensors(self, random_key: Tensor, count: int) -> Tensor:
        """Return the same, computed on the device."""
        places = _mix(paddle.arange(0, count, 1, paddle.int32))
        layer = _word(noise.sign(noise.layer_code(self.name)))
        words = _mix(places ^ paddle.unsqueeze(_mix(random_key ^ layer), 1)) & _word(noise.RANGE - 1)
        return words >= _word(noise.threshold(self.p))

    @override
    def extra_repr(self) -> str:
        return f"p={self.p}"


def _word(value: int) -> Tensor:
    return paddle.full((), value, paddle.int32)


def _mix(x: Tensor) -> Tensor:
    """Return ``noise.mix`` of words as int32."""
    for shift, factor in noise.ROUNDS:
        x = (x ^ _shift(x, shift)) * _word(factor)
    return x ^ _shift(x, noise.LAST_SHIFT)


def _shift(x: Tensor, shift: int) -> Tensor:
    """Shift the words to the right and fill up with zeros."""
    # Paddle 2.6 has no shift. Its division rounds down, as the shift of a signed number does.
    moved = x // (1 << shift) if paddle2_compatibility.NEEDED else paddle.bitwise_right_shift(x, _word(shift))
    return moved & _word((1 << (32 - shift)) - 1)


def _count(x_BCHW: Tensor) -> int:
    """Return the number of values per channel.

    Raises:
        ValueError: It is less than two, which has no variance.
    """
    batch, _, height, width = x_BCHW.shape
    if batch * height * width < 2:
        raise ValueError(f"BatchNorm2d in training needs more than one value of each channel, got shape {x_BCHW.shape}")
    return int(batch * height * width)


def _moments(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance of each channel, both of shape (1, C, 1, 1)."""
    mean_C11 = paddle.mean(x_BCHW, _REDUCED, keepdim=True)
    return mean_C11, paddle.mean(paddle.square(x_BCHW - mean_C11), _REDUCED, keepdim=True)


def _planes(x_C: Tensor) -> Tensor:
    return paddle.reshape(x_C, (1, -1, 1, 1))


def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> Tensor:
    """See ``core/nn.pyi``."""
    return paddle.create_parameter(list(shape), "float32", default_initializer=Constant(fill))


def buffer(module: Layer, name: str, array: Array, *, persistent: bool = True) -> None:
    """See ``core/nn.pyi``."""
    module.register_buffer(name, paddle.to_tensor(np.asarray(array)), persistable=persistent)


def frozen(module: Layer, values: Callable[[Mapping[str, Array]], Mapping[str, Array]], *, like: Layer) -> Layer:
    """See ``core/nn.pyi``. New layers are made on the current device, which is that of ``like``."""
    module.to(dtype=next(iter(like.parameters())).dtype)
    state.fill(module.state_dict(), values(state.arrays(module)), what="the weights")
    for parameter in module.parameters():
        parameter.stop_gradient = True
    module.eval()
    return module
