"""Tensors whose channels are known by identity, and what the neutral functions do to them.

A ``Traced`` wraps a tensor of the bound framework, computes as it does, and remembers which channel lies where along one
axis. A function that is not listed here may mix channels or depend on their number, so the channels of its arguments are
fixed, and its result is an ordinary tensor.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Tensor
from mtrain_deploy.pruning.channels import Channels, Ids

Function: TypeAlias = Callable[..., Any]


class Size(int):
    """A size that was read from a tensor and not written in the model's code, so that it follows the channels."""

    def __floordiv__(self, other: int) -> "Size":
        return Size(int(self) // int(other))

    def __sub__(self, other: int) -> "Size":
        return Size(int(self) - int(other))


class Traced:
    """A tensor of the bound framework with the identities of its channels along ``axis``."""

    def __init__(self, value: Tensor, axis: int, ids: Ids, channels: Channels) -> None:
        self.value = value
        self.axis = axis
        self.ids = ids
        self.channels = channels

    def with_value(self, value: Tensor, axis: int | None = None, ids: Ids | None = None) -> "Traced":
        """Return a traced ``value`` that has these channels, or others of the same trace."""
        return Traced(value, self.axis if axis is None else axis, self.ids if ids is None else ids, self.channels)

    def fix(self) -> Tensor:
        """Fix the channels, and return the tensor."""
        self.channels.fix(self.ids)
        return self.value

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, marked as those of a tensor."""
        return tuple(Size(size) for size in self.value.shape)

    def __getitem__(self, key: Any) -> Any:
        return _item(self, key)

    def __neg__(self) -> "Traced":
        return self.with_value(-self.value)


def _operator(name: str, *, swapped: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def apply(one: Any, other: Any) -> Any:
        pair = (other, one) if swapped else (one, other)
        return _elementwise(function, *pair)

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "le", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _operator(_name, swapped=False))
    if _name not in ("lt", "le", "gt", "ge"):
        setattr(Traced, f"__r{_name}__", _operator(_name, swapped=True))


def raw(value: Any) -> Any:
    """Return a value without identities, whose channels are fixed; also within lists and tuples."""
    if isinstance(value, Traced):
        return value.fix()
    if isinstance(value, Size):
        return int(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(raw(item) for item in value)
    return value


@contextmanager
def tracing() -> Iterator[None]:
    """Have the functions of ``core.ops`` follow the channels of traced tensors within the context."""
    former = {name: vars(ops)[name] for name in ops.NAMES}
    vars(ops).update({name: _following(name, function) for name, function in former.items()})
    try:
        yield
    finally:
        vars(ops).update(former)


def _following(name: str, function: Function) -> Function:
    handler: Function = _HANDLERS.get(name, _unknown)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _has_traced(args) or _has_traced(tuple(kwargs.values())):
            return handler(function, *args, **kwargs)
        return function(*raw(args), **{key: raw(value) for key, value in kwargs.items()})

    return call


def _has_traced(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, Traced) or (isinstance(value, list | tuple) and _has_traced(value)) for value in values
    )


def _unknown(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*raw(args), **{key: raw(value) for key, value in kwargs.items()})


def _same(function: Function, x: Traced, *args: Any, **kwargs: Any) -> Any:
    """Follow a function of one tensor that keeps the shape; further arguments are no tensors of the trace."""
    return x.with_value(function(x.value, *raw(args), **{key: raw(value) for key, value in kwargs.items()}))


def _of_maps(function: Function, x: Traced, *args: Any, **kwargs: Any) -> Any:
    """Follow a function of maps (B, C, H, W) that treats each channel alone."""
    if x.axis != 1:
        return _unknown(function, x, *args, **kwargs)
    return _same(function, x, *args, **kwargs)


def _elementwise(function: Function, one: Any, other: Any) -> Any:
    """Follow a function of two tensors that broadcast."""
    x, y = one if isinstance(one, Traced) else None, other if isinstance(other, Traced) else None
    result = function(one.value if x else raw(one), other.value if y else raw(other))
    base = x or y
    assert base is not None
    count = len(result.shape)
    axes = [count - len(t.value.shape) + t.axis for t in (x, y) if t is not None]
    if x is not None and y is not None:
        if axes[0] != axes[1] or len(x.ids) != len(y.ids):
            x.fix()
            y.fix()
            return result
        x.channels.tie(x.ids, y.ids)
        return x.with_value(result, axes[0])
    plain = other if y is None else one
    from_end = count - axes[0]
    # A plain array with a value for each channel was made for their number, which must then stay.
    shape = tuple(getattr(plain, "shape", ()))
    if (len(shape) >= from_end and shape[-from_end] != 1) or result.shape[axes[0]] != len(base.ids):
        base.fix()
        return result
    return base.with_value(result, axes[0])


def _concat(function: Function, arrays: Sequence[Any], axis: int = 0) -> Any:
    traced = [x for x in arrays if isinstance(x, Traced)]
    place = axis % len(traced[0].value.shape)
    if any(x.axis != traced[0].axis for x in traced):
        return _unknown(function, arrays, axis=axis)
    first = traced[0]
    if place != first.axis:
        if len(traced) < len(arrays):
            return _unknown(function, arrays, axis=axis)
        for x in traced[1:]:
            first.channels.tie(first.ids, x.ids)
        return first.with_value(function([x.value for x in traced], axis))
    ids = [x.ids if isinstance(x, Traced) else first.channels.new_fixed(int(x.shape[place])) for x in arrays]
    joined = function([x.value if isinstance(x, Traced) else x for x in arrays], axis)
    return first.with_value(joined, ids=np.concatenate(ids))


def _follow_split(function: Function, x: Traced, sizes: Sequence[int], *, axis: int = 0) -> Any:
    """Follow a split; one of the channels keeps them free only where all sizes follow from the tensor and are equal."""
    whole = [int(size) for size in sizes]
    parts = function(x.value, whole, axis=axis)
    if axis % len(x.value.shape) != x.axis:
        return [x.with_value(part) for part in parts]
    if len(set(whole)) > 1 or not all(isinstance(size, Size) for size in sizes):
        x.fix()
        return parts
    pieces = np.split(x.ids, len(whole))
    for piece in pieces[1:]:
        x.channels.tie(pieces[0], piece)
    return [x.with_value(part, ids=piece) for part, piece in zip(parts, pieces, strict=True)]


def _reshape(function: Function, x: Traced, shape: Sequence[int]) -> Any:
    """Follow a new shape that keeps the channels together, on an axis whose size is not written in the code."""
    before, former = [int(size) for size in x.value.shape], [int(size) for size in shape]
    result = function(x.value, former)
    sizes = [int(size) for size in result.shape]
    leading = int(np.prod(before[: x.axis]))
    for axis, size in enumerate(sizes):
        follows = former[axis] == -1 or isinstance(shape[axis], Size)
        if size == before[x.axis] and int(np.prod(sizes[:axis])) == leading and follows:
            return x.with_value(result, axis)
    x.fix()
    return result


def _permute(function: Function, x: Traced, axes: Sequence[int]) -> Any:
    return x.with_value(function(x.value, axes), [axis % len(axes) for axis in axes].index(x.axis))


def _reduce(function: Function, x: Traced, *, axis: Any = None, keepdims: bool = False) -> Any:
    count = len(x.value.shape)
    axes = range(count) if axis is None else [a % count for a in ([axis] if isinstance(axis, int) else axis)]
    result = function(x.value, axis=axis, keepdims=keepdims)
    if x.axis in axes:
        x.fix()
        return result
    return x.with_value(result, x.axis if keepdims else x.axis - sum(a < x.axis for a in axes))


def _expand(function: Function, x: Traced, axis: int) -> Any:
    place = axis % (len(x.value.shape) + 1)
    return x.with_value(function(x.value, axis), x.axis + (place <= x.axis))


def _squeeze(function: Function, x: Traced, axis: int) -> Any:
    place = axis % len(x.value.shape)
    if place == x.axis:
        return _unknown(function, x, axis)
    return x.with_value(function(x.value, axis), x.axis - (place < x.axis))


def _shape(function: Function, x: Traced) -> tuple[int, ...]:
    return x.shape


def _plain(function: Function, x: Traced) -> Any:
    return function(x.value)


def _like(function: Function, *args: Any, like: Traced, **kwargs: Any) -> Any:
    return function(*raw(args), like=like.value, **{key: raw(value) for key, value in kwargs.items()})


def _item(x: Traced, key: Any) -> Any:
    """Follow an index that takes whole channels; every other one fixes them."""
    keys = list(key) if isinstance(key, tuple) else [key]
    count, axis, place = len(x.value.shape), 0, 0
    if not all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys):
        return x.fix()[raw(key)]
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis in keys:
        dots = keys.index(Ellipsis)
        keys[dots : dots + 1] = [slice(None)] * (count - taken)
    for k in keys:
        if axis == x.axis and k is not None:
            if k != slice(None):
                return x.fix()[key]
            break
        axis += k is not None
        place += k is None or isinstance(k, slice)
    return x.with_value(x.value[key], place + (x.axis - axis))


def _binary(function: Function, one: Any, other: Any) -> Any:
    return _elementwise(function, one, other)


_SAME = (
    "abs astype atan clip detach exp floor gelu hardsigmoid log ones_like pow relu round sigmoid silu softplus sqrt "
    "square tanh trunc zeros_like"
)
_HANDLERS: Mapping[str, Function] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "upsample_nearest", "resize_bilinear"), _of_maps),
    **dict.fromkeys(("maximum", "minimum"), _binary),
    **dict.fromkeys(("mean", "sum", "max", "min"), _reduce),
    **dict.fromkeys(("zeros", "full", "arange", "asarray"), _like),
    "concat": _concat,
    "split": _follow_split,
    "reshape": _reshape,
    "permute_dims": _permute,
    "expand_dims": _expand,
    "squeeze": _squeeze,
    "shape": _shape,
    "dtype": _plain,
}
