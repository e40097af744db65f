"""Tensor functions that are the same in every framework. ``core.binding.bind`` fills in those of one framework.

Until then the module is empty.

The stub ``ops.pyi`` defines them.
"""

from mtrain.errors import UnboundError

NAMES = (
    # creation
    "arange", "asarray", "constant", "full", "meshgrid", "one_hot", "ones_like", "zeros", "zeros_like",
    # type, shape, autograd
    "astype", "detach", "dtype", "shape", "to_numpy",
    # layout
    "broadcast_to", "concat", "expand_dims", "permute_dims", "reshape", "split", "squeeze", "stack",
    # indexing
    "argsort", "nonzero", "put_along_axis", "take", "take_along_axis", "topk", "where",
    # element by element
    "abs", "atan", "clip", "exp", "floor", "gelu", "hardsigmoid", "isfinite", "log", "maximum", "minimum", "pow",
    "relu", "round", "sigmoid", "silu", "softplus", "sqrt", "square", "tanh", "trunc",
    # along an axis
    "all", "any", "argmax", "cumulative_sum", "log_softmax", "max", "mean", "min", "softmax", "sum", "var",
    # networks and losses
    "avg_pool2d", "binary_cross_entropy_with_logits", "conv2d", "cross_entropy", "einsum", "fake_quantise", "matmul", "max_pool2d",
    "resize_bilinear", "scaled_dot_product_attention", "upsample_nearest",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name in NAMES:
        raise UnboundError(f"ops.{name}: no framework bound: load a backend first")
    raise AttributeError(f"module 'mtrain.core.ops' has no attribute {name!r}; core/ops.pyi lists what it has")
