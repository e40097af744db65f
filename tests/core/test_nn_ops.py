"""The neutral layers and functions: contract, binding, values, gradients. Runs under every framework."""
# ruff: noqa: E501  (the tables read best with a function a line)

import ast
import inspect
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mtrain.core import binding, nn, ops
from mtrain.errors import PluginError

CORE = Path(nn.__file__).parent


@pytest.fixture(autouse=True)
def bound_framework(framework) -> Iterator[None]:
    binding.bind(framework.nn, framework.ops)
    yield
    binding.bind(framework.nn, framework.ops)


NO_ELEMENTS = "most functions of Paddle 2.6 refuse tensors without elements"
LACKS = {
    ("paddle", "2"): {
        **{f"test_tensors_without_elements_go_through[{name}]": NO_ELEMENTS for name in ("creation", "layout", "indexing", "operators", "functions", "reductions")},
        "test_a_gradient_goes_through_tensors_without_elements": NO_ELEMENTS,
        "test_gradients_are_the_slopes[remainder]": "% of Paddle 2.6 has no gradient",
        "test_integers_beyond_the_reach_of_floats_stay_exact": "Paddle 2.6 compares int64 with a number as float32",
    }
}  # fmt: skip
"""What a framework's version is known not to do: {test: reason}."""


@pytest.fixture(autouse=True)
def known_lacks(request, framework) -> None:
    version = sys.modules[framework.name].__version__.split(".")[0]
    reason = LACKS.get((framework.name, version), {}).get(request.node.name)
    if reason:
        request.applymarker(pytest.mark.xfail(reason=reason))


@pytest.fixture
def t(framework):
    """Makes a tensor of an array."""
    return framework.tensor


def stub(name):
    """Return the declarations of a stub: {name: node}."""
    tree = ast.parse((CORE / f"{name}.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def parameters_of(node):
    """{name: (keyword only, default or empty)} of a declared function, or of a declared class's __init__."""
    if isinstance(node, ast.ClassDef):
        inits = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
        node = inits[0] if inits else ast.parse("def __init__(self): ...").body[0]
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    missing = [inspect.Parameter.empty] * (len(positional) - len(arguments.defaults))
    defaults = missing + [eval(ast.unparse(x)) for x in arguments.defaults]
    actual = {a.arg: (False, d) for a, d in zip(positional, defaults, strict=True)}
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        actual[a.arg] = (True, inspect.Parameter.empty if d is None else eval(ast.unparse(d)))
    actual.pop("self", None)
    return actual


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# ------------------------------------------------------------------------------------------------------------- contract
@pytest.mark.parametrize(("name", "module"), [("nn", nn), ("ops", ops)])
def test_the_stub_lists_just_the_names_that_are_bound(name, module):
    assert set(stub(name)) == set(module.NAMES)
    assert len(set(module.NAMES)) == len(module.NAMES)


@pytest.mark.parametrize("name", ["nn", "ops"])
def test_every_name_of_a_stub_is_described(name):
    assert [key for key, node in stub(name).items() if not ast.get_docstring(node)] == []


def written_in(module, value):
    """The function that this module itself defines for a name, None where it is the framework's own."""
    function = value.__init__ if inspect.isclass(value) else value
    if not inspect.isfunction(function) or Path(inspect.getfile(function)) != Path(module.__file__):
        return None  # its values are compared below
    return function


@pytest.mark.parametrize("name", ["nn", "ops"])
def test_own_signatures_agree_with_the_stub(framework, name):
    module, compared = getattr(framework, name), 0
    for key, node in stub(name).items():
        function = written_in(module, getattr(module, key))
        if function is None:
            continue
        compared += 1
        actual = {p.name: (p.kind is p.KEYWORD_ONLY, p.default) for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL}  # fmt: skip
        actual.pop("self", None)
        assert actual == parameters_of(node), key
    assert compared >= 3


@pytest.mark.parametrize(
    "key",
    ["Conv2d", "ConvTranspose2d", "Embedding", "GELU", "GroupNorm", "Linear", "LayerNorm", "MaxPool2d", "Upsample"],
)
def test_layers_take_what_the_stub_declares(framework, key):
    actual = inspect.signature(getattr(framework.nn, key)).parameters
    order = [name for name, p in actual.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    declared = parameters_of(stub("nn")[key])
    for position, (name, (keyword_only, default)) in enumerate(declared.items()):
        assert keyword_only or order[position] == name
        if default is not inspect.Parameter.empty:
            assert actual[name].default == default


# -------------------------------------------------------------------------------------------------------------- binding
@pytest.mark.job
def test_before_a_backend_is_loaded_every_name_says_so():
    code = (
        "import sys\nfrom mtrain.core import nn, ops\nfrom mtrain.errors import UnboundError\n"
        "count = 0\n"
        "for module in (nn, ops):\n"
        "    for name in module.NAMES:\n"
        "        try: getattr(module, name)\n"
        "        except UnboundError as error: count += 'no framework bound: load a backend first' in str(error)\n"
        "print(count == len(nn.NAMES) + len(ops.NAMES), bool({'torch', 'paddle'} & set(sys.modules)))"
    )
    assert run(code) == "True False"


def test_a_name_outside_the_contract_is_no_attribute():
    with pytest.raises(AttributeError, match=r"no attribute 'fft'; core/ops.pyi lists"):
        _ = ops.fft


def test_native_functions_and_layers_are_the_framework_s_own(framework):
    own = sys.modules[framework.name]
    assert issubclass(nn.Conv2d, own.nn.Conv2d if framework.name == "torch" else own.nn.Conv2D)
    assert nn.ReLU is own.nn.ReLU
    assert ops.concat is own.concat


def test_binding_the_same_again_changes_nothing_and_another_framework_is_refused(framework):
    binding.bind(framework.nn, framework.ops)
    name = f"mtrain.backends._{framework.name}.nn"
    assert binding.bound() == name
    other = ModuleType("other")
    with pytest.raises(PluginError, match=rf"other: {name} is bound in this process already"):
        binding.bind(other, other)


def test_a_framework_that_lacks_a_name_is_refused_whole():
    binding.unbind()
    assert binding.bound() is None
    other = ModuleType("other")
    vars(other).update({name: None for name in (*nn.NAMES, *ops.NAMES) if name != "concat"})
    with pytest.raises(PluginError, match=r"other\.concat missing"):
        binding.bind(other, other)
    assert binding.bound() is None


# --------------------------------------------------------------------------------------------------------------- values
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
Y = RNG.normal(size=(3, 4))
SCALES = np.asarray([[0.01], [0.003], [0.2]])
X234 = RNG.normal(size=(2, 3, 4))
IMAGE = RNG.normal(size=(2, 3, 6, 5))
KERNEL = RNG.normal(size=(4, 3, 3, 3))
INDEX = np.asarray([2, 0, 2])
ALONG = np.asarray([[0], [2], [1]])
BITS = X > 0
KEYS = RNG.permutation(12).reshape(3, 4)
BYTES = np.asarray([200, 100], np.uint8)


def softmax(x, axis):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def convolve(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("bchwij,ocij->bohw", windows, kernel)


def pool(x, size, stride, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[:, :, ::stride, ::stride].max((4, 5))


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attention(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def put(x, index, values, how):
    x = x.copy()
    for i, value in zip(index, values, strict=True):
        x[i] = {"set": value, "add": x[i] + value, "max": max(x[i], value)}[how]
    return x


def entropy(logits, labels, smoothing):
    count = logits.shape[1]
    target = np.eye(count)[labels] * (1 - smoothing) + smoothing / count
    return -(target * np.log(softmax(logits, 1))).sum(axis=1)


def averaged(x, size, stride, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[:, :, ::stride, ::stride].mean((4, 5))


def resized(x, size):
    """Bilinear, pixel by pixel."""
    height, width = x.shape[2:]
    y = np.empty((*x.shape[:2], *size), x.dtype)
    for i, j in np.ndindex(*size):
        v = min(max((i + 0.5) * height / size[0] - 0.5, 0), height - 1)
        u = min(max((j + 0.5) * width / size[1] - 0.5, 0), width - 1)
        top, left = int(v), int(u)
        low, right = min(top + 1, height - 1), min(left + 1, width - 1)
        above = x[:, :, top, left] * (1 - (u - left)) + x[:, :, top, right] * (u - left)
        below = x[:, :, low, left] * (1 - (u - left)) + x[:, :, low, right] * (u - left)
        y[:, :, i, j] = above * (1 - (v - top)) + below * (v - top)
    return y


def gelu_tanh(x):
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def spread(x, weight, bias, stride, padding, extra):
    """Transposed convolution, window by window; weight (in, out, kh, kw)."""
    (batch, _, height, width), (kh, kw) = x.shape, weight.shape[2:]
    shape = (batch, weight.shape[1], (height - 1) * stride + kh + extra, (width - 1) * stride + kw + extra)
    y = np.zeros(shape, np.result_type(x, weight, bias))
    for i, j in np.ndindex(height, width):
        y[:, :, i * stride : i * stride + kh, j * stride : j * stride + kw] += np.einsum(
            "bc,cdij->bdij", x[:, :, i, j], weight
        )
    return y[:, :, padding : shape[2] - padding, padding : shape[3] - padding] + bias[:, None, None]


def grouped(x, weight, bias, groups, eps):
    y = x.reshape(len(x), groups, -1)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    return y.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]


V5, V3 = RNG.normal(size=5), RNG.normal(size=3)
QKV = RNG.normal(size=(3, 2, 2, 4, 5))
LABELS = np.asarray([1, 3, 0])
T01 = RNG.random((3, 4))

# name -> pairs (found, expected); found is computed on first use
GOLDENS = {
    "arange": lambda t: [(ops.arange(1, 7, 2, like=t(X)), np.arange(1.0, 7, 2)), (ops.arange(0, 3, like=t(X), dtype="int64"), np.arange(3))],
    "asarray": lambda t: [(ops.asarray(X), X), (ops.asarray([[1, 2]], like=t(X)), np.asarray([[1.0, 2]])), (ops.asarray(X > 0, like=t(X), dtype="int64"), (X > 0).astype(np.int64))],
    "constant": lambda t: [(ops.constant(((1, 2),), like=t(X)), np.asarray([[1.0, 2]])), (ops.constant((1, 2), like=t(X), dtype="int64"), np.asarray([1, 2])), (ops.constant(0.1, like=t(X)), np.asarray(0.1))],
    "full": lambda t: [(ops.full((2, 3), 4.0, like=t(X)), np.full((2, 3), 4.0)), (ops.full((), 0.1, like=t(X)), np.asarray(0.1)), (ops.full((2,), 2**53 + 1, like=t(KEYS)), np.full(2, 2**53 + 1))],
    "zeros": lambda t: [(ops.zeros((2,), like=t(X), dtype="int64"), np.zeros(2, np.int64))],
    "zeros_like": lambda t: [(ops.zeros_like(t(X)), np.zeros_like(X))],
    "ones_like": lambda t: [(ops.ones_like(t(BITS)), np.ones_like(BITS))],
    "one_hot": lambda t: [(ops.one_hot(t(LABELS), 4), np.eye(4, dtype=np.float32)[LABELS])],
    "meshgrid": lambda t: [
        (ops.meshgrid(t(V3), t(V5))[0], np.meshgrid(V3, V5)[0]),
        (ops.meshgrid(t(V3), t(V5), indexing="ij")[1], np.meshgrid(V3, V5, indexing="ij")[1]),
    ],
    "astype": lambda t: [(ops.astype(t(X * 9), "int64"), (X * 9).astype(np.int64)), (ops.astype(t(X), "bool"), X != 0)],
    "detach": lambda t: [(ops.detach(t(X)), X)],
    "dtype": lambda t: [(np.asarray(ops.dtype(ops.astype(t(X), name)) == name), np.asarray(True)) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")],
    "shape": lambda t: [(np.asarray(ops.shape(t(X234))), np.asarray(X234.shape))],
    "to_numpy": lambda t: [(ops.to_numpy(t(X)), X), (ops.to_numpy(ops.astype(t(X * 0 + 1.5), "bfloat16")), np.full(X.shape, 1.5, np.float32))],
    "broadcast_to": lambda t: [(ops.broadcast_to(t(X)[:, None], (2, 3, 5, 4)), np.broadcast_to(X[:, None], (2, 3, 5, 4)))],
    "concat": lambda t: [(ops.concat((t(X), t(Y)), axis=1), np.concatenate((X, Y), 1)), (ops.concat([t(X), t(Y)]), np.concatenate((X, Y))), (ops.concat([t(BITS), t(BITS)]), np.concatenate((BITS, BITS)))],
    "stack": lambda t: [(ops.stack((t(X), t(Y)), axis=-1), np.stack((X, Y), -1))],
    "split": lambda t: [(ops.split(t(X), [1, 3], axis=1)[1], X[:, 1:]), (ops.split(t(X), (2, 1))[0], X[:2])],
    "expand_dims": lambda t: [(ops.expand_dims(t(X), axis=1), X[:, None])],
    "squeeze": lambda t: [(ops.squeeze(t(X[:, None]), axis=1), X)],
    "permute_dims": lambda t: [(ops.permute_dims(t(X234), (2, 0, 1)), X234.transpose(2, 0, 1))],
    "reshape": lambda t: [(ops.reshape(t(X234), (-1, 6)), X234.reshape(-1, 6))],
    "argsort": lambda t: [
        (ops.argsort(t(X), axis=0), X.argsort(0)),
        (ops.argsort(t(np.tile([3.0, 1.0, 2.0, 1.0], 50))), np.tile([3.0, 1.0, 2.0, 1.0], 50).argsort(kind="stable")),
        (ops.argsort(t(np.asarray([1, 2, 1, 2])), descending=True), np.asarray([1, 3, 0, 2])),
    ],
    "nonzero": lambda t: [(ops.nonzero(t(BITS))[i], np.nonzero(BITS)[i]) for i in (0, 1)] + [(ops.nonzero(t(X > 99))[1], np.nonzero(X > 99)[1])],
    "put_along_axis": lambda t: [
        (ops.put_along_axis(t(V5), t(INDEX), t(V3), axis=0, reduce="add"), put(V5, INDEX, V3, "add")),
        (ops.put_along_axis(t(V5), t(INDEX), t(V3), axis=0, reduce="max"), put(V5, INDEX, V3, "max")),
        (ops.put_along_axis(t(np.arange(5)), t(INDEX), t(np.asarray([7, 8, 1])), axis=0, reduce="add"), np.asarray([8, 1, 10, 3, 4])),
        (ops.put_along_axis(t(np.arange(5)), t(INDEX), t(np.asarray([7, -8, 9])), axis=0, reduce="max"), np.asarray([0, 1, 9, 3, 4])),
        (ops.put_along_axis(t(np.arange(5)), t(INDEX), t(np.asarray([7, 8, 7])), axis=0), np.asarray([8, 1, 7, 3, 4])),
        (ops.put_along_axis(t(V5), t(INDEX[:2]), t(V3[:2]), axis=0), put(V5, INDEX[:2], V3[:2], "set")),
        (ops.put_along_axis(t(X), t(ALONG), t(V3[:, None]), axis=1), np.stack([put(X[i], ALONG[i], V3[i : i + 1], "set") for i in range(3)])),
    ],
    "take": lambda t: [(ops.take(t(X), t(INDEX)), X[INDEX]), (ops.take(t(X), t(INDEX), axis=1), X[:, INDEX]), (ops.take(t(KEYS), t(INDEX)), KEYS[INDEX]), (ops.take(t(BITS), t(INDEX)), BITS[INDEX])],
    "take_along_axis": lambda t: [(ops.take_along_axis(t(X), t(ALONG), axis=1), np.take_along_axis(X, ALONG, 1)), (ops.take_along_axis(t(X), t(ALONG.T), axis=1), X[:, ALONG[:, 0]]), (ops.take_along_axis(t(X234), t(INDEX.reshape(1, 3, 1)), axis=1), X234[:, INDEX])],
    "topk": lambda t: [(ops.topk(t(X), 2, axis=0)[0], -np.sort(-X, 0)[:2]), (ops.topk(t(X), 2)[1], (-X).argsort(1)[:, :2])],
    "where": lambda t: [(ops.where(t(BITS), t(X), 0.0), np.where(BITS, X, 0.0)), (ops.where(t(BITS), t(X), t(Y)), np.where(BITS, X, Y)), (ops.where(t(BITS), 0.1, t(X)), np.where(BITS, 0.1, X)), (ops.where(t(BITS), t(KEYS), 7), np.where(BITS, KEYS, 7)), (ops.where(t(BITS[:, :1]), t(X), t(Y[0])), np.where(BITS[:, :1], X, Y[0])), (ops.where(t(BITS), t(BITS), t(~BITS)), np.ones_like(BITS))],
    "abs": lambda t: [(ops.abs(t(X)), np.abs(X))],
    "atan": lambda t: [(ops.atan(t(X)), np.arctan(X))],
    "clip": lambda t: [(ops.clip(t(X), -0.5, 0.5), X.clip(-0.5, 0.5)), (ops.clip(t(X), min=0), X.clip(0)), (ops.clip(t(X), max=0), X.clip(None, 0)), (ops.clip(t(X), -0.1, 0.3), X.clip(-0.1, 0.3)), (ops.clip(t(KEYS), 1), KEYS.clip(1)), (ops.clip(t(KEYS), max=2), KEYS.clip(None, 2))],
    "exp": lambda t: [(ops.exp(t(X)), np.exp(X))],
    "floor": lambda t: [(ops.floor(t(X * 3)), np.floor(X * 3))],
    "trunc": lambda t: [(ops.trunc(t(X * 3)), np.trunc(X * 3))],
    "pow": lambda t: [(ops.pow(t(np.abs(X)), e), np.abs(X) ** e) for e in (2, 0.3, 1.5)],
    "round": lambda t: [(ops.round(t(np.asarray([0.5, 1.5, -0.5, 2.4]))), np.asarray([0.0, 2, 0, 2]))],
    "isfinite": lambda t: [(ops.isfinite(t(np.asarray([1, np.nan, np.inf]))), np.asarray([True, False, False]))],
    "log": lambda t: [(ops.log(t(np.abs(X))), np.log(np.abs(X)))],
    "maximum": lambda t: [(ops.maximum(t(X), t(Y)), np.maximum(X, Y))],
    "minimum": lambda t: [(ops.minimum(t(X), t(Y)), np.minimum(X, Y))],
    "fake_quantise": lambda t: [
        (ops.fake_quantise(t(X), t(np.asarray(0.02)), t(np.asarray(3.0)), low=0, high=255), ((np.round(X / 0.02) + 3).clip(0, 255) - 3) * 0.02),
        (ops.fake_quantise(t(X), t(SCALES), t(np.asarray(0.0)), low=-127, high=127), np.round(X / SCALES).clip(-127, 127) * SCALES),
        (ops.fake_quantise(t(np.asarray([0.5, 1.5, 2.5, -0.5, 9.0])), t(np.asarray(1.0)), t(np.asarray(0.0)), low=-4, high=4), np.asarray([0.0, 2, 2, 0, 4])),
        (ops.fake_quantise(t(X.astype(np.float32)), t(np.float32([[0.05]])), t(np.float32([[0.0]])), low=-9, high=9), np.round(X.astype(np.float32) / np.float32(0.05)).clip(-9, 9) * np.float32(0.05)),
    ],
    "sqrt": lambda t: [(ops.sqrt(t(np.abs(X))), np.sqrt(np.abs(X)))],
    "square": lambda t: [(ops.square(t(X)), X**2)],
    "sigmoid": lambda t: [(ops.sigmoid(t(X)), sigmoid(X))],
    "hardsigmoid": lambda t: [(ops.hardsigmoid(t(X * 4)), (X * 4 / 6 + 0.5).clip(0, 1)), (ops.hardsigmoid(t(X), slope=0.2), (X * 0.2 + 0.5).clip(0, 1))],
    "relu": lambda t: [(ops.relu(t(X)), X.clip(0))],
    "silu": lambda t: [(ops.silu(t(X)), X * sigmoid(X))],
    "gelu": lambda t: [(ops.gelu(t(X)), gelu(X)), (ops.gelu(t(X), approximate="tanh"), gelu_tanh(X))],
    "softplus": lambda t: [(ops.softplus(t(X)), np.log1p(np.exp(X)))],
    "tanh": lambda t: [(ops.tanh(t(X)), np.tanh(X))],
    "sum": lambda t: [(ops.sum(t(X)), X.sum()), (ops.sum(t(X), axis=1, keepdims=True), X.sum(1, keepdims=True)), (ops.sum(t(X234), axis=(0, 2)), X234.sum((0, 2))), (ops.sum(t(BITS)), BITS.sum()), (ops.sum(t(BITS), axis=0), BITS.sum(0)), (ops.sum(t(KEYS.astype(np.int32)), axis=1), KEYS.sum(1)), (ops.sum(t(BYTES)), BYTES.sum(dtype=np.int64))],
    "mean": lambda t: [(ops.mean(t(X)), X.mean()), (ops.mean(t(X234), axis=(1, 2), keepdims=True), X234.mean((1, 2), keepdims=True))],
    "var": lambda t: [(ops.var(t(X)), X.var()), (ops.var(t(X), axis=1, correction=1, keepdims=True), X.var(1, ddof=1, keepdims=True)), (ops.var(t(X234), axis=(0, 2)), X234.var((0, 2)))],
    "max": lambda t: [(ops.max(t(X)), X.max()), (ops.max(t(X), axis=0), X.max(0)), (ops.max(t(X234), axis=(0, 2), keepdims=True), X234.max((0, 2), keepdims=True)), (ops.max(t(KEYS), axis=1), KEYS.max(1))],
    "min": lambda t: [(ops.min(t(X)), X.min()), (ops.min(t(X), axis=1, keepdims=True), X.min(1, keepdims=True))],
    "argmax": lambda t: [(ops.argmax(t(X)), X.argmax()), (ops.argmax(t(X), axis=1, keepdims=True), X.argmax(1, keepdims=True)), (ops.argmax(t(KEYS), axis=0), KEYS.argmax(0))],
    "all": lambda t: [(ops.all(t(BITS)), BITS.all()), (ops.all(t(BITS), axis=0, keepdims=True), BITS.all(0, keepdims=True))],
    "any": lambda t: [(ops.any(t(BITS)), BITS.any()), (ops.any(t(BITS), axis=1), BITS.any(1)), (ops.any(t(X * 0)), np.asarray(False))],
    "cumulative_sum": lambda t: [(ops.cumulative_sum(t(X), axis=1), X.cumsum(1)), (ops.cumulative_sum(t(BITS), axis=0), BITS.cumsum(0)), (ops.cumulative_sum(t(KEYS), axis=1), KEYS.cumsum(1))],
    "softmax": lambda t: [(ops.softmax(t(X), axis=0), softmax(X, 0))],
    "log_softmax": lambda t: [(ops.log_softmax(t(X), axis=1), np.log(softmax(X, 1)))],
    "matmul": lambda t: [(ops.matmul(t(X234), t(X.T)), X234 @ X.T)],
    "scaled_dot_product_attention": lambda t: [(ops.scaled_dot_product_attention(*map(t, QKV)), attention(*QKV))],
    "conv2d": lambda t: [
        (ops.conv2d(t(IMAGE), t(KERNEL), stride=2, padding=1), convolve(IMAGE, KERNEL, 2, 1)),
        (ops.conv2d(t(IMAGE), t(KERNEL), t(X[0])), convolve(IMAGE, KERNEL, 1, 0) + X[0][:, None, None]),
    ],
    "max_pool2d": lambda t: [(ops.max_pool2d(t(IMAGE), 3, 1, 1), pool(IMAGE, 3, 1, 1)), (ops.max_pool2d(t(IMAGE), 2), pool(IMAGE, 2, 2, 0))],
    "einsum": lambda t: [(ops.einsum("ij,bjk->bik", t(X[:, :3]), t(X234)), np.einsum("ij,bjk->bik", X[:, :3], X234)), (ops.einsum("bij->b", t(X234)), X234.sum((1, 2)))],
    "avg_pool2d": lambda t: [(ops.avg_pool2d(t(IMAGE), 3, 2, 1), averaged(IMAGE, 3, 2, 1)), (ops.avg_pool2d(t(IMAGE), 2), averaged(IMAGE, 2, 2, 0))],
    "resize_bilinear": lambda t: [(ops.resize_bilinear(t(IMAGE), size), resized(IMAGE, size)) for size in ((12, 10), (7, 13), (3, 4), (6, 5), (1, 1))] + [(ops.resize_bilinear(t(IMAGE[:, :, :1, :1]), (2, 3)), IMAGE[:, :, :1, :1].repeat(2, 2).repeat(3, 3))],
    "upsample_nearest": lambda t: [(ops.upsample_nearest(t(IMAGE), n), IMAGE.repeat(n, 2).repeat(n, 3)) for n in (2, 3, 5)],
    "binary_cross_entropy_with_logits": lambda t: [
        (ops.binary_cross_entropy_with_logits(t(X), t(T01), positive_weight=w), -(w * T01 * np.log(sigmoid(X)) + (1 - T01) * np.log(1 - sigmoid(X))))
        for w in (1.0, 2.5)
    ],
    "cross_entropy": lambda t: [(ops.cross_entropy(t(X), t(LABELS), label_smoothing=e), entropy(X, LABELS, e)) for e in (0.0, 0.1)],
}  # fmt: skip


def array(x):
    return x if isinstance(x, np.ndarray) else ops.to_numpy(x)


def agree(result, expected, rtol=1e-10, atol=1e-12):
    result, expected = array(result), np.asarray(expected)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ops.NAMES)
def test_functions_compute_what_numpy_computes(t, name):
    for found, expected in GOLDENS[name](t):
        agree(found, expected)


# ------------------------------------------------------------------------------------------------- operators, indexing
# x float64 (3, 4), i int64 (3, 4), b bool (3, 4): the same expression on arrays and on tensors
OPERATORS = {
    "float and number": lambda x, i, b: [x + 0.1, 0.1 + x, x - 0.1, 0.1 - x, x * 0.1, 0.1 * x, x / 255, 0.1 / x, x % 1, x % 0.3, x // 0.3, x**2, -x],
    "float and float": lambda x, i, b: [x + x, x - x, x * x, x / x, x % (x * x), x[:, :3] @ x, x * x[:, :1], x[0] * x[:, None]],
    "int and number": lambda x, i, b: [i + 1, 2 - i, i * 3, i // 2, i % 3, i**2, -i, (i - 5) // 3, (i - 5) % 3],
    "int and int": lambda x, i, b: [i + i, i - i, i * i, i // (i + 1), i % (i + 1)],
    "comparison with a number": lambda x, i, b: [x < 0.1, x <= 0, x > 0.5, x >= 0.5, x == 0, x != 0, i < 2.5, i == 3, i > 2, x <= 1],
    "comparison": lambda x, i, b: [x < x[0], x == x, i != i[:, :1], i > i[0]],
    "logic": lambda x, i, b: [b & b[0], b | (x > 1), ~b, (b & ~b) | b],
    "integers and slices": lambda x, i, b: [x[0], x[-1], x[1, 2], x[:, 1], x[1:], x[:2, 1:3], x[:, -1:], x[0:0], x[::2], x[..., 1], x[..., :2], b[0], i[:, 2]],
    "new axes": lambda x, i, b: [x[None], x[:, None], x[..., None], x[None, :, 1], x[:, None, :, None], b[:, :, None], i[0, None]],
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_indexing_mean_what_they_mean_in_numpy(t, name):
    for found, expected in zip(OPERATORS[name](t(X), t(KEYS), t(BITS)), OPERATORS[name](X, KEYS, BITS), strict=True):
        agree(found, expected, rtol=2e-15, atol=1e-15)


def test_integers_beyond_the_reach_of_floats_stay_exact(t):
    big = np.asarray([2**53 + 1, 2**62 - 1])
    for found, expected in ((t(big) + 1, big + 1), (t(big) - 3, big - 3), (ops.clip(t(big), 0), big), (t(big) // 3, big // 3), (ops.max(t(big)), big.max())):  # fmt: skip
        np.testing.assert_array_equal(array(found), expected)
    assert array(t(big) == 2**53 + 1).tolist() == [True, False]


def test_a_float32_tensor_stays_float32_next_to_a_number(t):
    x = t(X.astype(np.float32))
    for found in (
        x * 0.1,
        x + 1,
        1 / x,
        x % 1,
        ops.where(x > 0, x, 0.5),
        ops.clip(x, 0, 1),
        ops.hardsigmoid(x),
        ops.pow(x, 1.5),
    ):
        assert ops.dtype(found) == "float32"
    np.testing.assert_array_equal(
        array(ops.astype(t(np.arange(256, dtype=np.uint8)), "float32") / 255),
        np.arange(256, dtype=np.float32) / np.float32(255),
    )


def test_part_of_a_buffer_can_be_written(t):
    module = nn.Module()
    nn.buffer(module, "kept", X)
    before = module.kept
    module.kept[1:] = t(Y[1:]) * 2
    assert module.kept is before
    np.testing.assert_array_equal(array(module.kept), np.concatenate((X[:1], Y[1:] * 2)))


# ------------------------------------------------------------------------------------------------------- nothing at all
NONE, NONE_I, NONE_B = np.zeros((0, 4)), np.zeros((0,), np.int64), np.zeros((0, 4), bool)
EMPTY = {
    "creation": lambda t: [(ops.zeros((0, 3), like=t(X)), np.zeros((0, 3))), (ops.arange(0, 0, like=t(KEYS)), np.arange(0)), (ops.asarray(NONE, like=t(X)), NONE), (ops.one_hot(t(NONE_I), 3), np.zeros((0, 3), np.float32)), (ops.ones_like(t(NONE_B)), NONE_B), (ops.astype(t(NONE), "int64"), NONE.astype(np.int64))],
    "layout": lambda t: [
        (ops.concat((t(NONE), t(NONE))), NONE), (ops.concat((t(NONE), t(X))), X), (ops.concat((t(NONE), t(NONE)), axis=1), np.zeros((0, 8))), (ops.stack((t(NONE), t(NONE))), np.zeros((2, 0, 4))),
        (ops.reshape(t(np.zeros((5, 3, 0, 4))), (15, 0, 4)), np.zeros((15, 0, 4))), (ops.reshape(t(np.zeros((5, 3, 0, 4))), (3, 0, 4)), np.zeros((3, 0, 4))), (ops.reshape(t(NONE), (-1, 2)), np.zeros((0, 2))),
        (ops.permute_dims(t(NONE), (1, 0)), NONE.T), (ops.broadcast_to(t(np.zeros((1, 0, 4))), (3, 0, 4)), np.zeros((3, 0, 4))), (ops.broadcast_to(t(NONE_B[None]), (3, 0, 4)), np.zeros((3, 0, 4), bool)), (ops.split(t(NONE), [1, 3], axis=1)[1], NONE[:, :3]), (ops.split(t(X), [0, 3])[0], X[:0]),
    ],
    "indexing": lambda t: [
        (ops.take(t(X), t(NONE_I)), X[:0]), (ops.take(t(NONE), t(NONE_I)), NONE), (ops.take_along_axis(t(X), t(np.zeros((3, 0), np.int64)), axis=1), X[:, :0]), (ops.nonzero(t(NONE))[0], NONE_I),
        (ops.put_along_axis(t(V5), t(NONE_I), t(V5[:0]), axis=0), V5), (ops.put_along_axis(t(KEYS[0]), t(NONE_I), t(NONE_I), axis=0, reduce="max"), KEYS[0]), (ops.put_along_axis(t(V5), t(NONE_I), t(V5[:0]), axis=0, reduce="add"), V5),
        (ops.where(t(NONE_B), t(NONE), 0.0), NONE), (ops.argsort(t(NONE_I)), NONE_I), (t(NONE)[:, None], NONE[:, None]), (t(NONE)[..., 1], NONE[..., 1]), (t(NONE.T)[1], NONE.T[1]),
    ],
    "operators": lambda t: [(t(NONE) * 2 + 1, NONE), (1 / t(NONE), NONE), (t(NONE[None]) * t(X[:, :1, None]), np.zeros((3, 0, 4))), (t(NONE) < 3, NONE_B), (t(NONE_B) & ~t(NONE_B), NONE_B), (t(NONE) % 1, NONE), (t(NONE_I) * t(KEYS[:, :1]), np.zeros((3, 0), np.int64))],
    "functions": lambda t: [(ops.sigmoid(t(NONE)), NONE), (ops.square(t(NONE)), NONE), (ops.maximum(t(NONE), t(NONE)), NONE), (ops.clip(t(NONE), 0), NONE), (ops.trunc(t(NONE)), NONE), (ops.atan(t(NONE)), NONE), (ops.softmax(t(NONE), axis=1), NONE), (ops.binary_cross_entropy_with_logits(t(NONE), t(NONE)), NONE), (ops.binary_cross_entropy_with_logits(t(NONE), t(NONE), positive_weight=2.0), NONE), (ops.cross_entropy(t(NONE), t(NONE_I)), NONE[:, 0]), (ops.matmul(t(NONE), t(X.T)), np.zeros((0, 3)))],
    "reductions": lambda t: [(ops.sum(t(NONE)), np.asarray(0.0)), (ops.sum(t(NONE), axis=0), np.zeros(4)), (ops.sum(t(NONE), axis=1), np.zeros(0)), (ops.sum(t(NONE_B)), np.asarray(0)), (ops.mean(t(NONE)), np.asarray(np.nan)), (ops.mean(t(NONE), axis=1), np.zeros(0)), (ops.max(t(NONE), axis=1), np.zeros(0)), (ops.argmax(t(NONE), axis=1), NONE_I), (ops.any(t(NONE_B)), np.asarray(False)), (ops.all(t(NONE_B)), np.asarray(True)), (ops.any(t(NONE_B), axis=1), NONE_B[:, 0]), (ops.cumulative_sum(t(NONE), axis=0), NONE)],
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_tensors_without_elements_go_through(t, name):
    for found, expected in EMPTY[name](t):
        agree(found, expected)


def test_a_gradient_goes_through_tensors_without_elements(framework):
    x = framework.variable(X)
    none = ops.take(x, framework.tensor(NONE_I))
    wide = ops.reshape(ops.broadcast_to(none[None], (2, 0, 4)), (2, 0, 4))
    total = ops.sum(ops.sigmoid(wide) * 2) + ops.sum(ops.concat((none, x)))
    np.testing.assert_array_equal(framework.gradients(total, [x])[0], np.ones_like(X))


# ------------------------------------------------------------------------------------------------------------ gradients
W = RNG.normal(size=(3, 4))
GRADIENTS = {
    "abs": (lambda t, x: ops.abs(x), X), "atan": (lambda t, x: ops.atan(x), X), "exp": (lambda t, x: ops.exp(x), X), "log": (lambda t, x: ops.log(x), np.abs(X)),
    "sqrt": (lambda t, x: ops.sqrt(x), np.abs(X)), "square": (lambda t, x: ops.square(x), X), "sigmoid": (lambda t, x: ops.sigmoid(x), X), "silu": (lambda t, x: ops.silu(x), X),
    "gelu": (lambda t, x: ops.gelu(x), X), "softplus": (lambda t, x: ops.softplus(x), X), "relu": (lambda t, x: ops.relu(x), X), "hardsigmoid": (lambda t, x: ops.hardsigmoid(x), X),
    "clip": (lambda t, x: ops.clip(x, -0.5, 0.5), X), "pow": (lambda t, x: ops.pow(x, 1.3), np.abs(X)), "operators": (lambda t, x: (2 - x) * x / (3 + x) - x**3, X), "remainder": (lambda t, x: x % 1, X),
    "maximum": (lambda t, x: ops.maximum(x, t(Y)), X), "minimum": (lambda t, x: ops.minimum(t(Y), x), X), "where": (lambda t, x: ops.where(t(BITS), x, t(Y)), X),
    "take": (lambda t, x: ops.take(x, t(INDEX)), X), "take_along_axis": (lambda t, x: ops.take_along_axis(x, t(ALONG[[0, 1, 1]]), axis=0)[:, :1] * x, X),
    "put values": (lambda t, x: ops.put_along_axis(t(Y), t(KEYS % 3), x, axis=0, reduce="add") ** 2, X), "put into": (lambda t, x: ops.put_along_axis(x, t(ALONG), t(Y[:, :1]), axis=1), X),
    "set values": (lambda t, x: ops.put_along_axis(t(Y), t(ALONG), x[:, 2:3], axis=1), X), "topk": (lambda t, x: ops.topk(x, 2, axis=1)[0], X),
    "max": (lambda t, x: ops.max(x, axis=1), X), "min": (lambda t, x: ops.min(x), X), "sum": (lambda t, x: ops.sum(x, axis=(0, 1)) * x, X), "mean": (lambda t, x: ops.mean(x, axis=0) * x, X),
    "var": (lambda t, x: ops.var(x, axis=1, correction=1), X), "cumulative_sum": (lambda t, x: ops.cumulative_sum(x, axis=0), X), "softmax": (lambda t, x: ops.softmax(x, axis=1), X), "log_softmax": (lambda t, x: ops.log_softmax(x, axis=0), X),
    "matmul": (lambda t, x: ops.matmul(x, t(Y.T)), X), "layout": (lambda t, x: ops.stack((ops.concat((x, x), axis=1)[1:, 2:5], ops.permute_dims(ops.reshape(x, (4, 3)), (1, 0))[:2, :3])), X),
    "broadcast_to": (lambda t, x: ops.broadcast_to(x[:, None], (2, 3, 5, 4)), X), "split": (lambda t, x: ops.split(x, [1, 3], axis=1)[1] ** 2, X), "astype": (lambda t, x: ops.astype(ops.astype(x, "float64"), "float64") * x, X),
    "cross entropy logits": (lambda t, x: ops.binary_cross_entropy_with_logits(x, t(T01)), X), "weighted": (lambda t, x: ops.binary_cross_entropy_with_logits(x, t(T01), positive_weight=2.5), X),
    "cross entropy targets": (lambda t, x: ops.binary_cross_entropy_with_logits(t(X), x), T01), "cross_entropy": (lambda t, x: ops.cross_entropy(x, t(LABELS), label_smoothing=0.1), X),
    "conv2d": (lambda t, x: ops.conv2d(x, t(KERNEL), stride=2, padding=1), IMAGE), "conv2d weight": (lambda t, x: ops.conv2d(t(IMAGE), x, padding=1), KERNEL), "max_pool2d": (lambda t, x: ops.max_pool2d(x, 3, 1, 1), IMAGE), "upsample": (lambda t, x: ops.upsample_nearest(x, 2), IMAGE),
    "attention": (lambda t, x: ops.scaled_dot_product_attention(x, t(QKV[1]), t(QKV[2])), QKV[0]),
}  # fmt: skip


def differences(function, values, step=1e-6):
    """Central differences of a scalar function of an array."""
    actual = np.zeros_like(values)
    for place in np.ndindex(values.shape):
        moved = [values.copy(), values.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        actual[place] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return actual


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_slopes(framework, name):
    function, values = GRADIENTS[name]
    weights = framework.tensor(
        np.random.default_rng(1).normal(size=ops.shape(function(framework.tensor, framework.tensor(values))))
    )

    def total(x):
        return ops.sum(function(framework.tensor, x) * weights)

    x = framework.variable(values)
    actual = framework.gradients(total(x), [x])[0]
    expected = differences(lambda moved: float(array(total(framework.tensor(moved)))), values)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


KINKS = {
    "clip": (lambda t, x: ops.clip(x, 0, 1), [-1.0, 0, 0.5, 1, 2], [0.0, 1, 1, 1, 0]),
    "clip from below": (lambda t, x: ops.clip(x, 0), [-1.0, 0, 0.5], [0.0, 1, 1]),
    "clip from above": (lambda t, x: ops.clip(x, max=1), [0.5, 1, 2], [1.0, 1, 0]),
    "hardsigmoid": (lambda t, x: ops.hardsigmoid(x, slope=0.5), [-2.0, -1, 0, 1, 2], [0.0, 0.5, 0.5, 0.5, 0]),
    "maximum": (lambda t, x: ops.maximum(x, t(np.asarray([1.0, 2, 0]))), [1.0, 1, 1], [0.5, 0, 1]),
    "minimum": (lambda t, x: ops.minimum(x, t(np.asarray([1.0, 2, 0]))), [1.0, 1, 1], [0.5, 1, 0]),
    "max": (lambda t, x: ops.max(x), [1.0, 2, 2], [0, 0.5, 0.5]),
    "min": (lambda t, x: ops.min(x, axis=0), [1.0, 1, 2], [0.5, 0.5, 0]),
    "relu": (lambda t, x: ops.relu(x), [-1.0, 0, 1], [0.0, 0, 1]),
    "abs": (lambda t, x: ops.abs(x), [-1.0, 0, 1], [-1.0, 0, 1]),
    "floor": (lambda t, x: ops.floor(x) + ops.trunc(x) + ops.round(x), [0.2, 1.5], [0.0, 0]),
    "where": (lambda t, x: ops.where(x > 0, ops.log(x), 0.0), [1.0, 0.5], [1.0, 2]),
    "fake_quantise": (lambda t, x: ops.fake_quantise(x, t(np.asarray(0.5)), t(np.asarray(2.0)), low=0, high=4), [-1.3, -1.25, -1.0, 0.1, 1.0, 1.25, 1.3], [0.0, 1, 1, 1, 1, 1, 0]),
    "unchosen": (lambda t, x: ops.where(x > 0, x, 0.0), [0.0, 1], [0.0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINKS)
def test_gradients_where_there_is_no_slope_are_the_agreed_ones(framework, name):
    function, values, expected = KINKS[name]
    x = framework.variable(np.asarray(values))
    assert framework.gradients(ops.sum(function(framework.tensor, x)), [x])[0].tolist() == expected


def test_no_gradient_passes_a_detached_tensor_or_a_context_without_gradient(framework):
    x = framework.variable(np.ones(2))
    with nn.no_grad():
        inside = x * 2
    total = ops.sum(
        x * ops.detach(x) * 3 + inside + ops.put_along_axis(x, framework.tensor([0]), x[1:], axis=0, reduce="max")
    )
    assert framework.gradients(total, [x])[0].tolist() == [3, 3]
    np.testing.assert_array_equal(ops.to_numpy(x * 2), [2, 2])


def test_cross_entropies_stay_finite_far_out(t):
    far = t(np.asarray([-800.0, 800.0]))
    agree(ops.binary_cross_entropy_with_logits(far, t(np.asarray([1.0, 1.0]))), np.asarray([800.0, 0.0]))
    agree(
        ops.binary_cross_entropy_with_logits(far, t(np.asarray([1.0, 0.0])), positive_weight=2.0),
        np.asarray([1600.0, 800.0]),
    )
    agree(ops.log_softmax(far, axis=0), np.asarray([-1600.0, 0.0]))
    agree(ops.softplus(far), np.asarray([0.0, 800.0]))
    agree(ops.silu(far), np.asarray([0.0, 800.0]))


# --------------------------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_batchnorm_keeps_its_running_statistics_as_stated(framework, dtype, unbiased):
    layer = framework.to(nn.BatchNorm2d(3, eps=1e-3, momentum=0.03, unbiased_variance=unbiased), dtype)
    exact = {"rtol": 1e-9, "atol": 1e-12} if dtype == "float64" else {"rtol": 1e-5, "atol": 1e-5}
    mean, var = np.full(3, 0.5), np.full(3, 2.0)
    framework.load(layer, {"running_mean": mean, "running_var": var, "weight": V3, "bias": V3 * 2})
    live = framework.state(layer)
    scale, shift = V3[:, None, None], 2 * V3[:, None, None]
    for i in range(50):
        image = IMAGE * (1 + i % 5) + i % 3
        own_mean, own_var = image.mean((0, 2, 3)), image.var((0, 2, 3))
        expected = (image - own_mean[:, None, None]) / np.sqrt(own_var + 1e-3)[:, None, None] * scale + shift
        np.testing.assert_allclose(array(layer(framework.tensor(image.astype(dtype)))), expected, **exact)
        n = image.size // 3
        mean = 0.97 * mean + 0.03 * own_mean
        var = 0.97 * var + 0.03 * own_var * (n / (n - 1) if unbiased else 1)
        np.testing.assert_allclose(array(live["running_mean"]), mean, **exact)
        np.testing.assert_allclose(array(live["running_var"]), var, **exact)
    layer.eval()
    expected = (IMAGE - mean[:, None, None]) / np.sqrt(var + 1e-3)[:, None, None] * scale + shift
    np.testing.assert_allclose(array(layer(framework.tensor(IMAGE.astype(dtype)))), expected, **exact)
    np.testing.assert_allclose(array(live["running_var"]), var, **exact)
    assert list(framework.state(layer)) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert array(live["num_batches_tracked"]) == 50
    assert ops.dtype(live["num_batches_tracked"]) == "int64"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_gradients_of_batchnorm_are_the_slopes(framework, unbiased, dtype, training):
    weights = RNG.normal(size=IMAGE.shape)
    values = {"weight": V3, "bias": V3 * 2, "running_mean": V3 / 2, "running_var": V3**2}

    def total(x, weight, bias):
        axes = (0, 2, 3)
        mean, var = (x.mean(axes), x.var(axes)) if training else (values["running_mean"], values["running_var"])
        y = (x - mean[:, None, None]) / np.sqrt(var + 1e-3)[:, None, None] * weight[:, None, None] + bias[:, None, None]
        return float((y**2 * weights).sum())

    layer = framework.to(nn.BatchNorm2d(3, eps=1e-3, unbiased_variance=unbiased), dtype)
    framework.load(layer, values)
    (layer.train if training else layer.eval)()
    x = framework.variable(IMAGE.astype(dtype))
    first = ops.sum(ops.square(layer(x)) * framework.tensor(weights.astype(dtype)))
    if training:
        layer(framework.tensor(IMAGE.astype(dtype)) * 3)  # a second pass before backward moves the statistics once more
    actual = framework.gradients(first, [x, *framework.parameters(layer).values()])
    parts = (IMAGE, V3, V3 * 2)
    for i, part in enumerate(parts):
        expected = differences(lambda moved, i=i: total(*parts[:i], moved, *parts[i + 1 :]), part)
        limit = (1e-6, 1e-6) if dtype == "float64" else (1e-3, 1e-3)
        np.testing.assert_allclose(actual[i], expected, rtol=limit[0], atol=limit[1])


def test_batchnorm_needs_more_than_one_value_of_a_channel(framework):
    layer = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="more than"):
        layer(framework.tensor(np.ones((1, 3, 1, 1), np.float32)))


LAYERS = {
    "Identity": (lambda: nn.Identity(), lambda x, _: x),
    "SiLU": (lambda: nn.SiLU(), lambda x, _: x * sigmoid(x)),
    "ReLU": (lambda: nn.ReLU(), lambda x, _: x.clip(0)),
    "GELU": (lambda: nn.GELU(), lambda x, _: gelu(x)),
    "Sigmoid": (lambda: nn.Sigmoid(), lambda x, _: sigmoid(x)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), lambda x, _: x.repeat(2, 2).repeat(2, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), lambda x, _: pool(x, 3, 2, 1)),
    "Linear": (lambda: nn.Linear(5, 7), lambda x, s: x @ s["weight"].T + s["bias"]),
    "Linear without bias": (lambda: nn.Linear(5, 7, bias=False), lambda x, s: x @ s["weight"].T),
    "LayerNorm": (
        lambda: nn.LayerNorm(5, eps=1e-4),
        lambda x, s: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-4) * s["weight"] + s["bias"],
    ),
    "Conv2d": (
        lambda: nn.Conv2d(3, 4, 3, 2, 1),
        lambda x, s: convolve(x, s["weight"], 2, 1) + s["bias"][:, None, None],
    ),
    "Conv2d without bias": (lambda: nn.Conv2d(3, 4, (3, 3), bias=False), lambda x, s: convolve(x, s["weight"], 1, 0)),
    "GELU with tanh": (lambda: nn.GELU("tanh"), lambda x, _: gelu_tanh(x)),
    "ConvTranspose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1),
        lambda x, s: spread(x, s["weight"], s["bias"], 2, 1, 1),
    ),
    "ConvTranspose2d without bias": (lambda: nn.ConvTranspose2d(3, 2, 2, 2, bias=False), lambda x, s: spread(x, s["weight"], np.zeros(2), 2, 0, 0)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3, eps=1e-3), lambda x, s: grouped(x, s["weight"], s["bias"], 3, 1e-3)),
    "GroupNorm of one group": (lambda: nn.GroupNorm(1, 3), lambda x, s: grouped(x, s["weight"], s["bias"], 1, 1e-5)),
    "Sequential": (lambda: nn.Sequential(nn.ReLU(), nn.Sigmoid()), lambda x, _: sigmoid(x.clip(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_numpy_computes(framework, name):
    make, expected = LAYERS[name]
    layer = make()
    state = {key: RNG.normal(size=ops.shape(value)) for key, value in framework.state(layer).items()}
    layer = framework.to(layer, "float64")
    framework.load(layer, state)
    np.testing.assert_allclose(array(layer(framework.tensor(IMAGE))), expected(IMAGE, state), rtol=1e-9, atol=1e-12)


def ramp(x):
    """Weights of a total, so that every element counts differently."""
    return np.cos(np.arange(x.size)).reshape(x.shape)


def exact_slopes(function, values):
    """The derivative by every element, to rounding error: a step along the imaginary axis has no cancellation."""
    slopes = np.zeros(values.shape)
    for place in np.ndindex(values.shape):
        moved = values.astype(np.complex128)
        moved[place] += 1e-30j
        y = function(moved)
        slopes[place] = (y.imag * ramp(y)).sum() / 1e-30
    return slopes


EXACT = {
    "tanh": (lambda t, x: ops.tanh(x), np.tanh, X),
    "gelu": (lambda t, x: ops.gelu(x, approximate="tanh"), gelu_tanh, X),
    "einsum": (lambda t, x: ops.einsum("bij,ik->bkj", x, t(X)), lambda x: np.einsum("bij,ik->bkj", x, X), X234),
    "einsum second": (lambda t, x: ops.einsum("bij,ik->bkj", t(X234), x), lambda x: np.einsum("bij,ik->bkj", X234, x), X),
    "avg_pool2d": (lambda t, x: ops.avg_pool2d(x, 3, 2, 1), lambda x: averaged(x, 3, 2, 1), IMAGE),
    "resize larger": (lambda t, x: ops.resize_bilinear(x, (11, 13)), lambda x: resized(x, (11, 13)), IMAGE),
    "resize smaller": (lambda t, x: ops.resize_bilinear(x, (4, 2)), lambda x: resized(x, (4, 2)), IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_exact_to_rounding(framework, name):
    function, reference, values = EXACT[name]
    x = framework.variable(values)
    y = function(framework.tensor, x)
    actual = framework.gradients(ops.sum(y * framework.tensor(ramp(array(y)))), [x])[0]
    np.testing.assert_allclose(actual, exact_slopes(reference, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["GELU with tanh", "ConvTranspose2d", "GroupNorm", "GroupNorm of one group"])
def test_gradients_of_layers_are_exact_to_rounding(framework, name):
    make, reference = LAYERS[name]
    layer = make()
    state = {key: RNG.normal(size=ops.shape(value)) for key, value in framework.state(layer).items()}
    layer = framework.to(layer, "float64")
    framework.load(layer, state)
    image, x = IMAGE[:, :, :4, :3], framework.variable(IMAGE[:, :, :4, :3])
    y, parameters = layer(x), framework.parameters(layer)
    total = ops.sum(y * framework.tensor(ramp(array(y))))
    slope_x, *slopes = framework.gradients(total, [x, *parameters.values()])
    np.testing.assert_allclose(slope_x, exact_slopes(lambda v: reference(v, state), image), rtol=1e-12, atol=1e-12)
    for key, slope in zip(parameters, slopes, strict=True):
        expected = exact_slopes(lambda v, key=key: reference(image, {**state, key: v}), state[key])
        np.testing.assert_allclose(slope, expected, rtol=1e-12, atol=1e-12, err_msg=key)


def test_an_embedding_looks_up_rows_and_adds_up_their_gradients(framework):
    layer = framework.to(nn.Embedding(5, 3), "float64")
    table, indices = RNG.normal(size=(5, 3)), np.asarray([[4, 0], [4, 2]])
    framework.load(layer, {"weight": table})
    y = layer(framework.tensor(indices))
    np.testing.assert_array_equal(array(y), table[indices])
    weights = ramp(table[indices])
    slope = framework.gradients(ops.sum(y * framework.tensor(weights)), [layer.weight])[0]
    expected = np.zeros((5, 3))
    np.add.at(expected, indices, weights)
    np.testing.assert_allclose(slope, expected, rtol=1e-15)


def test_a_linear_layer_keeps_its_weight_as_outputs_by_inputs(framework):
    shapes = {name: ops.shape(x) for name, x in framework.state(nn.Linear(5, 7)).items()}
    assert shapes == {"weight": (7, 5), "bias": (7,)}


def test_parameters_and_buffers_are_part_of_the_state_unless_said_otherwise(framework):
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.parameter((2, 3), fill=0.5)
            nn.buffer(self, "grid", np.arange(3, dtype=np.float32))
            nn.buffer(self, "labels", np.arange(3))
            nn.buffer(self, "scratch", np.zeros(1), persistent=False)
            self.parts = nn.ModuleList([nn.Identity(), nn.Linear(2, 2)])

        def forward(self, x):
            return x * self.scale[0, 0] * self.grid[1]

    mine = Mine()
    assert list(framework.state(mine)) == ["scale", "grid", "labels", "parts.1.weight", "parts.1.bias"]
    assert list(framework.parameters(mine)) == ["scale", "parts.1.weight", "parts.1.bias"]
    assert ops.dtype(mine.scale) == "float32"
    assert array(mine.scale).tolist() == [[0.5] * 3] * 2
    assert ops.dtype(mine.scratch) == "float64"
    assert len(mine.parts) == 2
    assert [type(part) for part in mine.parts] == [nn.Identity, nn.Linear]
    grid, scale = mine.grid, mine.scale
    mine = framework.to(mine, "float64")
    assert mine.grid is grid or framework.name == "torch"
    assert mine.scale is scale
    assert {name: ops.dtype(x) for name, x in framework.state(mine).items()} == {
        "scale": "float64", "grid": "float64", "labels": "int64", "parts.1.weight": "float64", "parts.1.bias": "float64",
    }  # fmt: skip
    assert framework.gradients(mine(framework.tensor(np.asarray(3.0))), [mine.scale])[0][0].tolist() == [3, 0, 0]


def test_integers_of_layers_in_a_sequence_stay_integers_in_another_type(framework):
    layers = framework.to(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), "float64")
    kinds = {name: ops.dtype(x) for name, x in framework.state(layers).items()}
    assert kinds.pop("1.num_batches_tracked") == "int64"
    assert set(kinds.values()) == {"float64"}
