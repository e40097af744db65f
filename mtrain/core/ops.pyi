"""Neutral functions: the contract that every framework's ``ops`` keeps.

Names follow the Array API standard where it has one, else PyTorch. Types are named by strings: "float64", "float32",
"bfloat16", "float16", "int64", "int32", "uint8", "bool". Operators (``+ - * / // ** % @ < <= == & | ~``) between tensors of one type,
or a tensor and a number, and indexing with integers, slices and None mean on tensors of every framework what they mean in numpy; an
integer tensor next to a float number becomes float32. Nothing works in place.
``like`` names a tensor on whose device the new one is made, and whose type it has unless ``dtype`` says otherwise.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

from mtrain.core.interfaces import Array, Tensor

NAMES: Final[tuple[str, ...]]
"""Every name of this contract."""

# ---------------------------------------------------------------------------------------------------------- creation
def asarray(values: Any, *, like: Tensor | None = None, dtype: str | None = None) -> Tensor:
    """A tensor from a numpy array, a number or nested lists, copied. Without ``like``: on the CPU, with numpy's type."""

def zeros(shape: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    """All 0."""

def full(shape: Sequence[int], value: float, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """All ``value``."""

def arange(start: int, stop: int, step: int = 1, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """``start``, ``start + step``, ... below ``stop``."""

def zeros_like(x: Tensor) -> Tensor:
    """All 0, shape and type of ``x``."""

def ones_like(x: Tensor) -> Tensor:
    """All 1, shape and type of ``x``."""

def one_hot(x: Tensor, class_count: int, *, dtype: str = "float32") -> Tensor:
    """int64 (...) to (..., class_count): 1 at each index. Every index must be below ``class_count``."""

def meshgrid(*arrays: Tensor, indexing: Literal["ij", "xy"] = "xy") -> Sequence[Tensor]:
    """Coordinate grids of vectors; (len(y), len(x)) for ``meshgrid(x, y, indexing="xy")``."""

# ----------------------------------------------------------------------------------------------- type, shape, autograd
def astype(x: Tensor, dtype: str) -> Tensor:
    """``x`` with another type; ``x`` itself where it has that type already."""

def dtype(x: Tensor) -> str:
    """Name of the type."""

def shape(x: Tensor) -> tuple[int, ...]:
    """The shape as a tuple of integers."""

def detach(x: Tensor) -> Tensor:
    """The same values, through which no gradient flows."""

def to_numpy(x: Tensor) -> Array:
    """A numpy array of the values, on the host; bfloat16 becomes float32."""

# ------------------------------------------------------------------------------------------------------------- layout
def concat(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along an axis that exists."""

def stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along a new axis."""

def split(x: Tensor, sizes: Sequence[int], *, axis: int = 0) -> Sequence[Tensor]:
    """Parts of the given sizes, which add up to the axis."""

def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in C order; one size may be -1."""

def permute_dims(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Axis i of the result is axis ``axes[i]`` of ``x``."""

def expand_dims(x: Tensor, axis: int) -> Tensor:
    """A new axis of size 1."""

def squeeze(x: Tensor, axis: int) -> Tensor:
    """Without the axis, which has size 1."""

def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` repeated along axes of size 1 and new leading axes."""

# ----------------------------------------------------------------------------------------------------------- indexing
def where(condition: Tensor, x1: Tensor | float, x2: Tensor | float) -> Tensor:
    """``x1`` where the condition holds, else ``x2``; no gradient reaches what is not chosen."""

def nonzero(x: Tensor) -> tuple[Tensor, ...]:
    """Indices (int64) of what is not 0, one vector per axis, in C order. The size depends on the values: the device is waited for."""

def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """The slices along ``axis`` that an int64 vector names."""

def take_along_axis(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """``result[.., i, ..] = x[.., indices[.., i, ..], ..]``; int64 ``indices`` broadcast against ``x`` along the other axes."""

def put_along_axis(
    x: Tensor, indices: Tensor, values: Tensor, *, axis: int, reduce: Literal["set", "add", "max"] = "set"
) -> Tensor:
    """A copy of ``x`` with ``values`` put, added, or kept if larger than what is there, where int64 ``indices`` say (same shapes).

    "set": where an index comes twice its values must be equal. "max" has no gradient.
    """

def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The ``k`` largest along the axis, falling, and their int64 indices; the order of equal ones is not defined."""

def argsort(x: Tensor, *, axis: int = -1, descending: bool = False) -> Tensor:
    """int64 indices that sort along the axis; equal ones keep their order."""

# ------------------------------------------------------------------------------------------------- element by element
def abs(x: Tensor) -> Tensor:
    """Absolute value."""

def atan(x: Tensor) -> Tensor:
    """Arc tangent in radians."""

def clip(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Limit to [min, max]; the gradient is 0 outside, 1 at the limits."""

def exp(x: Tensor) -> Tensor:
    """e to the power of ``x``."""

def floor(x: Tensor) -> Tensor:
    """Largest whole number not above ``x``, type kept."""

def trunc(x: Tensor) -> Tensor:
    """Whole part, towards 0, type kept."""

def round(x: Tensor) -> Tensor:
    """Nearest whole number, halves to even, type kept."""

def isfinite(x: Tensor) -> Tensor:
    """True for all but nan and infinities."""

def log(x: Tensor) -> Tensor:
    """Natural logarithm."""

def maximum(x1: Tensor, x2: Tensor) -> Tensor:
    """The larger of two tensors of one type, element by element; equal ones share the gradient."""

def minimum(x1: Tensor, x2: Tensor) -> Tensor:
    """The smaller of two tensors of one type, element by element; equal ones share the gradient."""

def pow(x: Tensor, exponent: float) -> Tensor:
    """``x`` to a power that is a number. Use it where ``**`` may meet a number that float32 rounds."""

def sqrt(x: Tensor) -> Tensor:
    """Square root."""

def square(x: Tensor) -> Tensor:
    """``x * x``."""

def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""

def hardsigmoid(x: Tensor, *, slope: float = 1 / 6, offset: float = 0.5) -> Tensor:
    """``clip(slope * x + offset, 0, 1)``."""

def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""

def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""

def gelu(x: Tensor) -> Tensor:
    """``x * Phi(x)`` with the exact normal distribution function."""

def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""

# ------------------------------------------------------------------------------------------------------ along an axis
def sum(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Sum over an axis, several, or all; of integers and booleans an int64."""

def mean(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Mean of a float tensor; nan where there is nothing."""

def var(
    x: Tensor, *, axis: int | Sequence[int] | None = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Variance: squared deviations over ``n - correction``."""

def max(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Largest value; the gradient is shared among equal ones."""

def min(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Smallest value; the gradient is shared among equal ones."""

def argmax(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """int64 index of the largest value; of all elements in C order when ``axis`` is None."""

def all(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """True where all are."""

def any(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """True where one is."""

def cumulative_sum(x: Tensor, *, axis: int) -> Tensor:
    """Sum of this element and all before it."""

def softmax(x: Tensor, axis: int) -> Tensor:
    """``exp(x) / sum(exp(x))`` along the axis."""

def log_softmax(x: Tensor, axis: int) -> Tensor:
    """Logarithm of the softmax, without overflow."""

# ------------------------------------------------------------------------------------------------- networks and losses
def matmul(x1: Tensor, x2: Tensor) -> Tensor:
    """Matrix product of the last two axes; the others broadcast."""

def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``softmax(query @ key.T / sqrt(D)) @ value``, each (B, heads, N, D). Vaswani et al. 2017, equation 1."""

def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation, as ``nn.Conv2d``."""

def max_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Largest value of each window, as ``nn.MaxPool2d``."""

def upsample_nearest(x: Tensor, scale: int) -> Tensor:
    """Every pixel of (B, C, H, W) ``scale`` times in both directions."""

def binary_cross_entropy_with_logits(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    """``-(positive_weight * t * log(s) + (1 - t) * log(1 - s))``, s = sigmoid(logits), element by element, without overflow."""

def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Per row of ``logits`` (N, C) with int64 ``labels`` (N): ``-sum(target * log_softmax)``, shape (N).

    ``target`` is one-hot times ``1 - label_smoothing`` plus ``label_smoothing / C``.
    """
