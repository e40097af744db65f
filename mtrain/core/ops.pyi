"""The tensor functions that every framework's ``ops`` must provide.

Names follow the Array API standard, or PyTorch where the standard has no such function. Types are named by strings:
"float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool". Operators (``+ - * / // ** % @ < <= == &
| ~``) between two tensors of one type or a tensor and a number, and indexing with integers, slices and None, have the
same meaning in every framework as in numpy; an integer tensor combined with a float number becomes float32. No function
changes its arguments. ``like`` is a tensor: the new tensor is made on its device, and has its type unless ``dtype``
sets another one.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

from mtrain.core.interfaces import Array, Tensor

Values = float | tuple["Values", ...]
"""A number, or nested tuples of numbers."""
NAMES: Final[tuple[str, ...]]
"""The name of every function of this module."""

# ---------------------------------------------------------------------------------------------------------- creation
def asarray(values: Any, *, like: Tensor | None = None, dtype: str | None = None) -> Tensor:
    """Copy a numpy array, a number or nested lists into a tensor. Without ``like``: on the CPU, with numpy's type."""

def constant(values: Values, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """Return ``asarray`` of a number or of nested tuples, which is sent to the device once and kept: do not change it."""

def zeros(shape: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    """Return a tensor filled with 0."""

def full(shape: Sequence[int], value: float, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """Return a tensor filled with ``value``."""

def arange(start: int, stop: int, step: int = 1, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """Return the vector ``start``, ``start + step``, ... up to but without ``stop``."""

def zeros_like(x: Tensor) -> Tensor:
    """Return a tensor filled with 0, of the shape and type of ``x``."""

def ones_like(x: Tensor) -> Tensor:
    """Return a tensor filled with 1, of the shape and type of ``x``."""

def one_hot(x: Tensor, class_count: int, *, dtype: str = "float32") -> Tensor:
    """Turn int64 indices (...) into vectors (..., class_count) with a 1 at the index, which must be in range."""

def meshgrid(*arrays: Tensor, indexing: Literal["ij", "xy"] = "xy") -> Sequence[Tensor]:
    """Return coordinate grids of vectors, of shape (len(y), len(x)) for ``meshgrid(x, y, indexing="xy")``."""

# ----------------------------------------------------------------------------------------------- type, shape, autograd
def astype(x: Tensor, dtype: str) -> Tensor:
    """Convert ``x`` to another type; return ``x`` itself if it has that type already."""

def dtype(x: Tensor) -> str:
    """Return the name of the tensor's type."""

def shape(x: Tensor) -> tuple[int, ...]:
    """Return the shape as a tuple of integers."""

def detach(x: Tensor) -> Tensor:
    """Return the same values, through which no gradient flows."""

def to_numpy(x: Tensor) -> Array:
    """Return the values as a numpy array on the host; bfloat16 becomes float32."""

# ------------------------------------------------------------------------------------------------------------- layout
def concat(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along an axis that exists."""

def stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along a new axis."""

def split(x: Tensor, sizes: Sequence[int], *, axis: int = 0) -> Sequence[Tensor]:
    """Cut an axis into parts of the given sizes, which must add up to the size of the axis."""

def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same elements, in C order, in another shape; one size may be -1."""

def permute_dims(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Reorder the axes: axis i of the result is axis ``axes[i]`` of ``x``."""

def expand_dims(x: Tensor, axis: int) -> Tensor:
    """Insert a new axis of size 1."""

def squeeze(x: Tensor, axis: int) -> Tensor:
    """Remove an axis, which must have size 1."""

def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat ``x`` along axes of size 1 and along new leading axes."""

# ----------------------------------------------------------------------------------------------------------- indexing
def where(condition: Tensor, x1: Tensor | float, x2: Tensor | float) -> Tensor:
    """Choose ``x1`` where the condition holds, else ``x2``. No gradient reaches a value that is not chosen."""

def nonzero(x: Tensor) -> tuple[Tensor, ...]:
    """Return the int64 indices of the elements that are not 0, one vector per axis, in C order.

    The size of the result depends on the values, so the call waits for the device.
    """

def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Return the slices along ``axis`` at the positions in an int64 vector."""

def take_along_axis(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return ``result[.., i, ..] = x[.., indices[.., i, ..], ..]``.

    The int64 ``indices`` broadcast against ``x`` along the other axes.
    """

def put_along_axis(
    x: Tensor, indices: Tensor, values: Tensor, *, axis: int, reduce: Literal["set", "add", "max"] = "set"
) -> Tensor:
    """Return a copy of ``x`` in which ``values`` change the elements at the positions ``indices`` along ``axis``.

    ``indices`` and ``values`` have the same shape. "set" replaces the element; if an index occurs twice, its values
    must be equal. "add" adds to the element. "max" takes the larger of the two and has no gradient.
    """

def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values along an axis in descending order, and their int64 indices.

    The order of equal values is not defined.
    """

def argsort(x: Tensor, *, axis: int = -1, descending: bool = False) -> Tensor:
    """Return the int64 indices that sort ``x`` along an axis; equal values keep their order."""

# ------------------------------------------------------------------------------------------------- element by element
def abs(x: Tensor) -> Tensor:
    """Absolute value."""

def atan(x: Tensor) -> Tensor:
    """Arc tangent in radians."""

def clip(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Limit values to [min, max]; the gradient is 0 outside and 1 at the limits."""

def exp(x: Tensor) -> Tensor:
    """e to the power of ``x``."""

def floor(x: Tensor) -> Tensor:
    """Round down to a whole number, without changing the type."""

def trunc(x: Tensor) -> Tensor:
    """Round towards 0 to a whole number, without changing the type."""

def round(x: Tensor) -> Tensor:
    """Round to the nearest whole number, halves to even, without changing the type."""

def isfinite(x: Tensor) -> Tensor:
    """Return True for each element that is neither nan nor infinite."""

def log(x: Tensor) -> Tensor:
    """Natural logarithm."""

def maximum(x1: Tensor, x2: Tensor) -> Tensor:
    """The larger of two tensors of one type, element by element; equal elements share the gradient."""

def minimum(x1: Tensor, x2: Tensor) -> Tensor:
    """The smaller of two tensors of one type, element by element; equal elements share the gradient."""

def pow(x: Tensor, exponent: float) -> Tensor:
    """Raise ``x`` to a power that is a number. Use it instead of ``**`` where float32 would round that number."""

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

def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``x * Phi(x)`` with the exact normal distribution function.

    "tanh": with ``(1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2`` in its place. Hendrycks and Gimpel 2016, section 2.
    """

def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""

def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""

# ------------------------------------------------------------------------------------------------------ along an axis
def sum(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Sum over one axis, several, or all; for integers and booleans the result is int64."""

def mean(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Mean of a float tensor over one axis, several, or all; nan if there are no elements."""

def var(
    x: Tensor, *, axis: int | Sequence[int] | None = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Variance: the sum of squared deviations divided by ``n - correction``."""

def max(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Largest value; equal elements share the gradient."""

def min(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Smallest value; equal elements share the gradient."""

def argmax(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int64 index of the largest value; without ``axis``, its position among all elements in C order."""

def all(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return whether all elements along the axis are true."""

def any(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return whether any element along the axis is true."""

def cumulative_sum(x: Tensor, *, axis: int) -> Tensor:
    """Sum of each element and all elements before it along the axis."""

def softmax(x: Tensor, axis: int) -> Tensor:
    """``exp(x) / sum(exp(x))`` along the axis."""

def log_softmax(x: Tensor, axis: int) -> Tensor:
    """Logarithm of the softmax along the axis, computed without overflow."""

# ------------------------------------------------------------------------------------------------- networks and losses
def matmul(x1: Tensor, x2: Tensor) -> Tensor:
    """Matrix product of the last two axes; the others broadcast."""

def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Sum of products in Einstein's notation, such as ``"bchw,cd->bdhw"``; the equation names the result's axes."""

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

def fake_quantise(x: Tensor, scale: Tensor, zero_point: Tensor, *, low: float, high: float) -> Tensor:
    """Round to ``(clip(q, low, high) - zero_point) * scale`` with ``q = round(x / scale) + zero_point``, halves to even.

    The result has the type of ``x``; it is computed in the type of ``scale`` and ``zero_point``, which broadcast against
    ``x``. The gradient of ``x`` passes unchanged where ``low <= q <= high``, and is 0 elsewhere (Bengio et al. 2013,
    "straight-through"); ``scale`` and ``zero_point`` get none. It is ONNX's QuantizeLinear and DequantizeLinear.
    """

def max_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Largest value of each window, as ``nn.MaxPool2d``."""

def avg_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Mean of each window; padding counts as zeros. ``stride`` None: the kernel size."""

def resize_bilinear(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize (B, C, H, W) to ``size`` (height, width) by linear interpolation in both directions.

    Pixels are squares: the centre of output pixel i is at ``(i + 0.5) * H / height - 0.5`` of the input, and the border is
    continued outwards. Shrinking does not average over more than the two nearest pixels.
    """

def upsample_nearest(x: Tensor, scale: int) -> Tensor:
    """Repeat every pixel of (B, C, H, W) ``scale`` times in both directions."""

def binary_cross_entropy_with_logits(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    """Binary cross entropy of each element, computed without overflow.

    It is ``-(positive_weight * t * log(s) + (1 - t) * log(1 - s))`` with s = sigmoid(logits) and t = targets.
    """

def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy ``-sum(target * log_softmax)`` of each row of ``logits`` (N, C), shape (N).

    ``labels`` (N) are int64.

    ``target`` is the one-hot vector times ``1 - label_smoothing``, plus ``label_smoothing / C``.
    """
