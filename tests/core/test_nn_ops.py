"""The neutral layers and functions: contract, binding, values."""
# ruff: noqa: E501  (the table of goldens reads best with a function a line)

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
import torch

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core import binding, nn, ops
from mtrain.core.errors import PluginError

CORE = Path(nn.__file__).parent


@pytest.fixture(autouse=True)
def bound_framework() -> Iterator[None]:
    binding.bind(torch_nn, torch_ops)
    yield
    binding.bind(torch_nn, torch_ops)


def stub(name):
    """What a stub declares: {name: node}."""
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
    found = {a.arg: (False, d) for a, d in zip(positional, defaults, strict=True)}
    for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[a.arg] = (True, inspect.Parameter.empty if d is None else eval(ast.unparse(d)))
    found.pop("self", None)
    return found


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


def signature_or_none(function):
    try:
        return inspect.signature(function)
    except ValueError:
        return None  # a builtin of the framework: its values are compared below


@pytest.mark.parametrize(("name", "module"), [("nn", torch_nn), ("ops", torch_ops)])
def test_signatures_of_torch_agree_with_the_stub(name, module):
    compared = 0
    for key, node in stub(name).items():
        signature = signature_or_none(getattr(module, key))
        if signature is None or Path(inspect.getfile(getattr(module, key))).parent != Path(module.__file__).parent:
            continue
        compared += 1
        declared = parameters_of(node)
        found = {
            p.name: (p.kind is p.KEYWORD_ONLY, p.default) for p in signature.parameters.values()
            if p.kind is not p.VAR_POSITIONAL
        }  # fmt: skip
        assert found == declared, key
    assert compared >= 3


@pytest.mark.parametrize("key", ["Conv2d", "Linear", "LayerNorm", "MaxPool2d", "Upsample"])
def test_native_layers_take_what_the_stub_declares(key):
    found = inspect.signature(getattr(torch_nn, key)).parameters
    order = [name for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    declared = parameters_of(stub("nn")[key])
    for position, (name, (keyword_only, default)) in enumerate(declared.items()):
        assert keyword_only or order[position] == name
        if default is not inspect.Parameter.empty:
            assert found[name].default == default


# -------------------------------------------------------------------------------------------------------------- binding
def test_before_a_backend_is_loaded_every_name_says_so():
    code = (
        "import sys\nfrom mtrain.core import nn, ops\nfrom mtrain.core.errors import UnboundError\n"
        "count = 0\n"
        "for module in (nn, ops):\n"
        "    for name in module.NAMES:\n"
        "        try: getattr(module, name)\n"
        "        except UnboundError as error: count += 'no framework bound: load a backend first' in str(error)\n"
        "print(count == len(nn.NAMES) + len(ops.NAMES), bool({'torch', 'paddle'} & set(sys.modules)))"
    )
    assert run(code) == "True False"


def test_a_name_outside_the_contract_is_no_attribute():
    with pytest.raises(AttributeError, match=r"no attribute 'einsum'; core/ops.pyi lists"):
        _ = ops.einsum


def test_native_layers_are_the_framework_s_own():
    assert nn.Conv2d is torch.nn.Conv2d
    assert nn.Module is torch.nn.Module
    assert ops.concat is torch.concat


def test_binding_the_same_again_changes_nothing_and_another_framework_is_refused():
    binding.bind(torch_nn, torch_ops)
    assert binding.bound() == "mtrain.backends._torch.nn"
    other = ModuleType("other")
    with pytest.raises(PluginError, match=r"other: mtrain\.backends\._torch\.nn is bound in this process already"):
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
X234 = RNG.normal(size=(2, 3, 4))
IMAGE = RNG.normal(size=(2, 3, 6, 5))
KERNEL = RNG.normal(size=(4, 3, 3, 3))
INDEX = np.asarray([2, 0, 2])
ALONG = np.asarray([[0], [2], [1]])
BITS = X > 0


def t(array):
    return torch.from_numpy(np.ascontiguousarray(array))


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


V5, V3 = RNG.normal(size=5), RNG.normal(size=3)
QKV = RNG.normal(size=(3, 2, 2, 4, 5))
LABELS = np.asarray([1, 3, 0])
T01 = RNG.random((3, 4))

# name -> pairs (found, expected); found is computed on first use
GOLDENS = {
    "arange": lambda: [(ops.arange(1, 7, 2, like=t(X)), np.arange(1.0, 7, 2)), (ops.arange(0, 3, like=t(X), dtype="int64"), np.arange(3))],
    "asarray": lambda: [(ops.asarray(X), X), (ops.asarray([[1, 2]], like=t(X)), np.asarray([[1.0, 2]])), (ops.asarray(X > 0, like=t(X), dtype="int64"), (X > 0).astype(np.int64))],
    "full": lambda: [(ops.full((2, 3), 4.0, like=t(X)), np.full((2, 3), 4.0))],
    "zeros": lambda: [(ops.zeros((2,), like=t(X), dtype="int64"), np.zeros(2, np.int64))],
    "zeros_like": lambda: [(ops.zeros_like(t(X)), np.zeros_like(X))],
    "ones_like": lambda: [(ops.ones_like(t(BITS)), np.ones_like(BITS))],
    "one_hot": lambda: [(ops.one_hot(t(LABELS), 4), np.eye(4, dtype=np.float32)[LABELS])],
    "meshgrid": lambda: [
        (ops.meshgrid(t(V3), t(V5))[0], np.meshgrid(V3, V5)[0]),
        (ops.meshgrid(t(V3), t(V5), indexing="ij")[1], np.meshgrid(V3, V5, indexing="ij")[1]),
    ],
    "astype": lambda: [(ops.astype(t(X * 9), "int64"), (X * 9).astype(np.int64)), (ops.astype(t(X), "bool"), X != 0)],
    "detach": lambda: [(ops.detach(t(X).requires_grad_()), X)],
    "dtype": lambda: [(np.asarray(ops.dtype(ops.astype(t(X), name)) == name), np.asarray(True)) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")],
    "shape": lambda: [(np.asarray(ops.shape(t(X234))), np.asarray(X234.shape))],
    "to_numpy": lambda: [(ops.to_numpy(t(X).requires_grad_()), X), (ops.to_numpy(torch.ones(2, dtype=torch.bfloat16)), np.ones(2, np.float32))],
    "broadcast_to": lambda: [(ops.broadcast_to(t(X)[:, None], (2, 3, 5, 4)), np.broadcast_to(X[:, None], (2, 3, 5, 4)))],
    "concat": lambda: [(ops.concat((t(X), t(Y)), axis=1), np.concatenate((X, Y), 1)), (ops.concat([t(X), t(Y)]), np.concatenate((X, Y)))],
    "stack": lambda: [(ops.stack((t(X), t(Y)), axis=-1), np.stack((X, Y), -1))],
    "split": lambda: [(ops.split(t(X), [1, 3], axis=1)[1], X[:, 1:]), (ops.split(t(X), (2, 1))[0], X[:2])],
    "expand_dims": lambda: [(ops.expand_dims(t(X), axis=1), X[:, None])],
    "squeeze": lambda: [(ops.squeeze(t(X[:, None]), axis=1), X)],
    "permute_dims": lambda: [(ops.permute_dims(t(X234), (2, 0, 1)), X234.transpose(2, 0, 1))],
    "reshape": lambda: [(ops.reshape(t(X234), (-1, 6)), X234.reshape(-1, 6))],
    "argsort": lambda: [
        (ops.argsort(t(X), axis=0), X.argsort(0)),
        (ops.argsort(t(np.asarray([1, 2, 1, 2])), descending=True), np.asarray([1, 3, 0, 2])),
    ],
    "nonzero": lambda: [(ops.nonzero(t(BITS))[i], np.nonzero(BITS)[i]) for i in (0, 1)],
    "put_along_axis": lambda: [
        (ops.put_along_axis(t(V5), t(INDEX), t(V3), axis=0, reduce="add"), put(V5, INDEX, V3, "add")),
        (ops.put_along_axis(t(V5), t(INDEX), t(V3), axis=0, reduce="max"), put(V5, INDEX, V3, "max")),
        (ops.put_along_axis(t(V5), t(INDEX[:2]), t(V3[:2]), axis=0), put(V5, INDEX[:2], V3[:2], "set")),
        (ops.put_along_axis(t(X), t(ALONG), t(V3[:, None]), axis=1), np.stack([put(X[i], ALONG[i], V3[i : i + 1], "set") for i in range(3)])),
    ],
    "take": lambda: [(ops.take(t(X), t(INDEX)), X[INDEX]), (ops.take(t(X), t(INDEX), axis=1), X[:, INDEX])],
    "take_along_axis": lambda: [(ops.take_along_axis(t(X), t(ALONG), axis=1), np.take_along_axis(X, ALONG, 1))],
    "topk": lambda: [(ops.topk(t(X), 2, axis=0)[0], -np.sort(-X, 0)[:2]), (ops.topk(t(X), 2)[1], (-X).argsort(1)[:, :2])],
    "where": lambda: [(ops.where(t(BITS), t(X), 0.0), np.where(BITS, X, 0.0)), (ops.where(t(BITS), t(X), t(Y)), np.where(BITS, X, Y))],
    "abs": lambda: [(ops.abs(t(X)), np.abs(X))],
    "atan": lambda: [(ops.atan(t(X)), np.arctan(X))],
    "clip": lambda: [(ops.clip(t(X), -0.5, 0.5), X.clip(-0.5, 0.5)), (ops.clip(t(X), min=0), X.clip(0)), (ops.clip(t(X), max=0), X.clip(None, 0))],
    "exp": lambda: [(ops.exp(t(X)), np.exp(X))],
    "floor": lambda: [(ops.floor(t(X * 3)), np.floor(X * 3))],
    "trunc": lambda: [(ops.trunc(t(X * 3)), np.trunc(X * 3))],
    "round": lambda: [(ops.round(t(np.asarray([0.5, 1.5, -0.5, 2.4]))), np.asarray([0.0, 2, 0, 2]))],
    "isfinite": lambda: [(ops.isfinite(t(np.asarray([1, np.nan, np.inf]))), np.asarray([True, False, False]))],
    "log": lambda: [(ops.log(t(np.abs(X))), np.log(np.abs(X)))],
    "maximum": lambda: [(ops.maximum(t(X), t(Y)), np.maximum(X, Y))],
    "minimum": lambda: [(ops.minimum(t(X), t(Y)), np.minimum(X, Y))],
    "sqrt": lambda: [(ops.sqrt(t(np.abs(X))), np.sqrt(np.abs(X)))],
    "square": lambda: [(ops.square(t(X)), X**2)],
    "sigmoid": lambda: [(ops.sigmoid(t(X)), sigmoid(X))],
    "hardsigmoid": lambda: [(ops.hardsigmoid(t(X * 4)), (X * 4 / 6 + 0.5).clip(0, 1)), (ops.hardsigmoid(t(X), slope=0.2), (X * 0.2 + 0.5).clip(0, 1))],
    "relu": lambda: [(ops.relu(t(X)), X.clip(0))],
    "silu": lambda: [(ops.silu(t(X)), X * sigmoid(X))],
    "gelu": lambda: [(ops.gelu(t(X)), gelu(X))],
    "softplus": lambda: [(ops.softplus(t(X)), np.log1p(np.exp(X)))],
    "sum": lambda: [(ops.sum(t(X)), X.sum()), (ops.sum(t(X), axis=1, keepdims=True), X.sum(1, keepdims=True)), (ops.sum(t(X234), axis=(0, 2)), X234.sum((0, 2))), (ops.sum(t(BITS)), BITS.sum())],
    "mean": lambda: [(ops.mean(t(X)), X.mean()), (ops.mean(t(X234), axis=(1, 2), keepdims=True), X234.mean((1, 2), keepdims=True))],
    "var": lambda: [(ops.var(t(X)), X.var()), (ops.var(t(X), axis=1, correction=1, keepdims=True), X.var(1, ddof=1, keepdims=True))],
    "max": lambda: [(ops.max(t(X)), X.max()), (ops.max(t(X), axis=0), X.max(0)), (ops.max(t(X234), axis=(0, 2), keepdims=True), X234.max((0, 2), keepdims=True))],
    "min": lambda: [(ops.min(t(X)), X.min()), (ops.min(t(X), axis=1, keepdims=True), X.min(1, keepdims=True))],
    "argmax": lambda: [(ops.argmax(t(X)), X.argmax()), (ops.argmax(t(X), axis=1, keepdims=True), X.argmax(1, keepdims=True))],
    "all": lambda: [(ops.all(t(BITS)), BITS.all()), (ops.all(t(BITS), axis=0, keepdims=True), BITS.all(0, keepdims=True))],
    "any": lambda: [(ops.any(t(BITS)), BITS.any()), (ops.any(t(BITS), axis=1), BITS.any(1))],
    "cumulative_sum": lambda: [(ops.cumulative_sum(t(X), axis=1), X.cumsum(1))],
    "softmax": lambda: [(ops.softmax(t(X), axis=0), softmax(X, 0))],
    "log_softmax": lambda: [(ops.log_softmax(t(X), axis=1), np.log(softmax(X, 1)))],
    "matmul": lambda: [(ops.matmul(t(X234), t(X.T)), X234 @ X.T)],
    "scaled_dot_product_attention": lambda: [(ops.scaled_dot_product_attention(*map(t, QKV)), attention(*QKV))],
    "conv2d": lambda: [
        (ops.conv2d(t(IMAGE), t(KERNEL), stride=2, padding=1), convolve(IMAGE, KERNEL, 2, 1)),
        (ops.conv2d(t(IMAGE), t(KERNEL), t(X[0])), convolve(IMAGE, KERNEL, 1, 0) + X[0][:, None, None]),
    ],
    "max_pool2d": lambda: [(ops.max_pool2d(t(IMAGE), 3, 1, 1), pool(IMAGE, 3, 1, 1)), (ops.max_pool2d(t(IMAGE), 2), pool(IMAGE, 2, 2, 0))],
    "upsample_nearest": lambda: [(ops.upsample_nearest(t(IMAGE), 2), IMAGE.repeat(2, 2).repeat(2, 3))],
    "binary_cross_entropy_with_logits": lambda: [
        (ops.binary_cross_entropy_with_logits(t(X), t(T01), positive_weight=w), -(w * T01 * np.log(sigmoid(X)) + (1 - T01) * np.log(1 - sigmoid(X))))
        for w in (1.0, 2.5)
    ],
    "cross_entropy": lambda: [(ops.cross_entropy(t(X), t(LABELS), label_smoothing=e), entropy(X, LABELS, e)) for e in (0.0, 0.1)],
}  # fmt: skip


@pytest.mark.parametrize("name", ops.NAMES)
def test_functions_compute_what_numpy_computes(name):
    for found, expected in GOLDENS[name]():
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_no_gradient_passes_a_detached_tensor_or_a_context_without_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not ops.detach(x).requires_grad
    with nn.no_grad():
        assert not (x * 2).requires_grad


def test_where_passes_no_gradient_to_what_is_not_chosen():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    ops.sum(ops.where(x > 0, x, 0.0)).backward()
    assert x.grad.tolist() == [0, 1]


@pytest.mark.parametrize("unbiased", [True, False])
def test_batchnorm_keeps_its_running_statistics_as_stated(unbiased):
    layer = nn.BatchNorm2d(3, eps=1e-3, momentum=0.03, unbiased_variance=unbiased).double()
    mean, var = np.full(3, 0.5), np.full(3, 2.0)
    layer.running_mean.copy_(t(mean))
    layer.running_var.copy_(t(var))
    for picture in (IMAGE, IMAGE * 2 + 1):
        own_mean, own_var = picture.mean((0, 2, 3)), picture.var((0, 2, 3))
        expected = (picture - own_mean[:, None, None]) / np.sqrt(own_var + 1e-3)[:, None, None]
        np.testing.assert_allclose(layer(t(picture)).detach(), expected, rtol=1e-9, atol=1e-12)
        n = picture.size // 3
        mean = 0.97 * mean + 0.03 * own_mean
        var = 0.97 * var + 0.03 * own_var * (n / (n - 1) if unbiased else 1)
        np.testing.assert_allclose(layer.running_mean, mean, rtol=1e-12)
        np.testing.assert_allclose(layer.running_var, var, rtol=1e-12)
    expected = (IMAGE - mean[:, None, None]) / np.sqrt(var + 1e-3)[:, None, None]
    np.testing.assert_allclose(layer.eval()(t(IMAGE)).detach(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(layer.running_var, var, rtol=1e-12)
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


LAYERS = {
    "Identity": (lambda: nn.Identity(), lambda x, _: x),
    "SiLU": (lambda: nn.SiLU(), lambda x, _: x * sigmoid(x)),
    "ReLU": (lambda: nn.ReLU(), lambda x, _: x.clip(0)),
    "GELU": (lambda: nn.GELU(), lambda x, _: gelu(x)),
    "Sigmoid": (lambda: nn.Sigmoid(), lambda x, _: sigmoid(x)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), lambda x, _: x.repeat(2, 2).repeat(2, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), lambda x, _: pool(x, 3, 2, 1)),
    "Linear": (lambda: nn.Linear(5, 7), lambda x, s: x @ s["weight"].T + s["bias"]),
    "LayerNorm": (
        lambda: nn.LayerNorm(5, eps=1e-4),
        lambda x, s: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-4) * s["weight"] + s["bias"],
    ),
    "Conv2d": (
        lambda: nn.Conv2d(3, 4, 3, 2, 1),
        lambda x, s: convolve(x, s["weight"], 2, 1) + s["bias"][:, None, None],
    ),
    "Sequential": (lambda: nn.Sequential(nn.ReLU(), nn.Sigmoid()), lambda x, _: sigmoid(x.clip(0))),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_numpy_computes(name):
    make, expected = LAYERS[name]
    layer = make().double()
    state = {key: value.numpy() for key, value in layer.state_dict().items()}
    np.testing.assert_allclose(layer(t(IMAGE)).detach(), expected(IMAGE, state), rtol=1e-9, atol=1e-12)


def test_parameters_and_buffers_are_part_of_the_state_unless_said_otherwise():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.parameter((2, 3), fill=0.5)
            nn.buffer(self, "grid", np.arange(3, dtype=np.float32))
            nn.buffer(self, "scratch", np.zeros(1), persistent=False)
            self.parts = nn.ModuleList([nn.Identity(), nn.Linear(2, 2)])

    mine = Mine()
    assert list(mine.state_dict()) == ["scale", "grid", "parts.1.weight", "parts.1.bias"]
    assert mine.scale.requires_grad
    assert mine.scale.dtype == torch.float32
    assert not mine.grid.requires_grad
    assert mine.scratch.dtype == torch.float64
    assert len(mine.parts) == 2
