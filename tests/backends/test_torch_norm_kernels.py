"""mtrain's own kernels: BatchNorm with and without SiLU against float64, whatever the layout and the threads; and how the
library is compiled, kept and left out."""

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._kernels import library
from mtrain.backends._torch import nn as ours
from mtrain.backends._torch import syncbn
from mtrain.core import compiling
from mtrain.core.interfaces import Recipe
from tests.backends.compiler import needs_a_compiler
from tests.backends.test_torch_batchnorm import CHANNELS, EXACT, LAYOUTS, _TwoHalves, channels_last, images, relative
from tests.framework import Framework


@needs_a_compiler
def test_the_kernels_are_used_where_there_is_a_compiler() -> None:
    for loaded in (library.load(), library.load_planes()):
        assert loaded.kernels is not None, loaded.reason


def layer(channels: int = CHANNELS, *, silu: bool = True, own: bool = True) -> ours.BatchNorm2d:
    generator = torch.Generator().manual_seed(1)
    made = ours.BatchNorm2d(channels, eps=1e-3, momentum=0.03, silu=silu)
    with torch.no_grad():
        made.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        made.bias.copy_(torch.randn(channels, generator=generator))
    made.kernels = own
    return made


def learnt(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of one training step."""
    x = x.detach().requires_grad_()
    y = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    return {"output": y, "input": grads[0], **dict(zip(names, grads[1:], strict=True)), **dict(module.named_buffers())}


def errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: relative(actual[name], expected[name]) for name in expected if "tracked" not in name}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_a_compiler
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(2, 16, 160, 160), (3, 16, 37, 31), (2, 3, 8, 8), (1, 7, 1, 1031), (2, 300, 5, 1), (5, 20, 1, 1), (1, 260, 9, 9)],
)
def test_a_training_step_is_that_of_float64(shape: tuple[int, ...], layout: str, silu: bool) -> None:
    x, dy = images(*shape, mean=0.5)
    module = layer(shape[1], silu=silu)
    expected = learnt(copy.deepcopy(module).double(), x.double(), dy.double())
    wide = channels_last(torch.cat([dy, dy], 1))[:, : shape[1]]  # the gradient of one part of a join
    given = {"slice of channels_last": wide, "transposed": dy.transpose(2, 3).contiguous().transpose(2, 3)}
    actual = learnt(module, channels_last(x), given.get(layout, dy))
    # The gradients of weight and bias may vanish but for rounding where a channel has a few pixels.
    assert {name: error for name, error in errors(actual, expected).items() if error > EXACT} == {}
    assert int(actual["num_batches_tracked"]) == 1


@needs_a_compiler
def test_the_kernels_are_at_least_as_exact_as_those_of_torch() -> None:
    x, dy = (channels_last(each) for each in images(4, CHANNELS, 160, 160, mean=3.0, deviation=0.1))
    expected = learnt(layer(own=False).double(), x.double().contiguous(), dy.double().contiguous())
    own, native = (errors(learnt(layer(own=each), x, dy), expected) for each in (True, False))
    assert {name: (own[name], native[name]) for name in own if own[name] > 1.2 * native[name]} == {}


@needs_a_compiler
def test_the_number_of_threads_changes_no_bit(threads: None) -> None:
    x, dy = (channels_last(each) for each in images(3, 24, 67, 71))
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(learnt(layer(24), x, dy))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


@needs_a_compiler
def test_silu_is_that_of_torch_over_the_whole_range_of_float32() -> None:
    """The weight of a BatchNorm makes the range."""
    x = torch.linspace(-1.7, 1.7, 100_001).view(1, 1, 1, -1).repeat(1, 8, 1, 1)
    module = layer(8)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1e-3, 1, 5, 20, 60, 1e3, 1e10, 1e30]))
        module.bias.zero_()
    expected = learnt(copy.deepcopy(module).double(), x.double(), torch.ones_like(x).double())["output"].detach()
    scale = expected.abs() + 1e-6 * module.weight.detach().view(1, -1, 1, 1)
    worst = {}
    for own in (True, False):
        module.kernels = own
        output = learnt(module, channels_last(x), torch.ones_like(x))["output"].detach().double()
        assert torch.isfinite(output).all()
        worst[own] = ((output - expected).abs() / scale).amax((0, 2, 3))
    assert (worst[True] < 2 * worst[False]).all(), worst


@needs_a_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x, dy = (channels_last(each) for each in images(2, CHANNELS, 20, 20))
    x[1, 3, 7, 5] = value
    result = learnt(layer(), x, dy)
    assert torch.isnan(result["output"][:, 3]).all()
    assert torch.isnan(result["input"][:, 3]).all()
    assert torch.isfinite(result["output"][:, 4]).all()


@needs_a_compiler
@pytest.mark.parametrize("silu", [True, False])
def test_statistics_over_ranks_are_as_exact_as_those_of_one(silu: bool) -> None:
    x, dy = images(4, CHANNELS, 80, 80)
    net = nn.Sequential(layer(silu=False))
    expected = learnt(copy.deepcopy(net).double(), x.double(), dy.double())
    syncbn.synchronize(net, _TwoHalves(channels_last(x[2:]), channels_last(dy[2:])))
    if silu:  # the second rank's gradient is that without SiLU; only the output can be compared
        net[0].silu = True
        output = net(channels_last(x[:2]))
        assert relative(output, nn.functional.silu(expected["output"][:2])) < EXACT
        return
    actual = learnt(net, channels_last(x[:2]), channels_last(dy[:2]))
    assert relative(actual["output"], expected["output"][:2]) < EXACT
    assert relative(actual["input"], expected["input"][:2]) < EXACT


@needs_a_compiler
def test_less_is_kept_for_the_backward_pass() -> None:
    x, _ = images(2, CHANNELS, 40, 40)
    sizes = {}
    for own in (True, False):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(own=own)(channels_last(x).requires_grad_())
        sizes[own] = sum(size for size in kept.values() if size >= x.numel())
    assert sizes == {True: x.numel(), False: 2 * x.numel()}


@needs_a_compiler
@pytest.mark.parametrize("choice", ["auto", "framework"])
def test_a_job_uses_the_kernels_that_the_spec_asks_for(framework: Framework, choice: str) -> None:
    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, channels_last=True, kernels=choice)
    with framework.solo() as session:
        model, _ = session.prepare(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), layer(8, own=False)), recipe)
        assert model[1].kernels is (choice == "auto")
        output = model(channels_last(torch.ones(2, 3, 9, 9)))
    assert ("_KernelNormalizeBackward" in output.grad_fn.name()) is (choice == "auto")


def test_frozen_layers_and_evaluation_apply_silu_too() -> None:
    x, _ = images(2, CHANNELS, 20, 20)
    expected = nn.functional.silu(layer(silu=False).eval()(x))
    assert torch.equal(layer().eval()(x), expected)
    net = nn.Sequential(layer())
    net[0].weight.requires_grad = False
    syncbn.freeze(net.train())
    assert torch.equal(net.train()(x), expected)


# ------------------------------------------------------------------------------------------------------- the library
def test_without_a_compiler_there_are_no_kernels_and_a_job_says_why(
    framework: Framework, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = library.load.__wrapped__()
    assert loaded.kernels is None
    monkeypatch.setattr(library, "load", lambda: loaded)
    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, channels_last=True)
    with framework.solo() as session:
        model, _ = session.prepare(lambda: nn.Sequential(layer(own=False)), recipe)
    assert model[0].kernels is False
    assert "train.kernels: BatchNorm is torch's" in caplog.text
    assert "there is no C compiler (no-such-compiler)" in caplog.text


def test_kernels_that_another_rank_lacks_are_not_used(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, channels_last=True)

    def gather(mine: object) -> list[object]:
        return [mine, "there is no C compiler (cc)"] if isinstance(mine, str) else [mine]

    with framework.solo() as session:
        monkeypatch.setattr(session.collective, "all_gather", gather)
        model, _ = session.prepare(lambda: nn.Sequential(layer(own=False)), recipe)
    assert model[0].kernels is False


@needs_a_compiler
def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "norm.c"
    source.write_text("#error not today\n", encoding="utf-8")
    with pytest.raises(compiling.CannotCompileError, match="refused the kernels"):
        compiling.compile_library(source)
    assert list((tmp_path / "mtrain/kernels").iterdir()) == []


@needs_a_compiler
def test_the_library_is_compiled_once_and_again_when_its_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n", encoding="utf-8")
    first = compiling.compile_library(source)
    written = first.stat().st_mtime_ns
    assert compiling.compile_library(source) == first
    assert first.stat().st_mtime_ns == written
    source.write_text("int one(void) { return 2; }\n", encoding="utf-8")
    assert compiling.compile_library(source) != first


def test_a_library_in_a_folder_that_others_can_write_to_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mtrain" / "kernels"
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)
    loaded = library.load.__wrapped__()
    assert loaded.kernels is None
    assert loaded.reason.endswith("belongs to another user or can be written by others")


@needs_a_compiler
def test_a_library_that_computes_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "norm.c"
    shutil.copy(library.SOURCE.with_name("common.h"), tmp_path)
    source.write_text(
        library.SOURCE.read_text(encoding="utf-8").replace("z * sigmoid(z)", "sigmoid(z)"), encoding="utf-8"
    )
    monkeypatch.setattr(library, "SOURCE", source)
    assert library.load.__wrapped__() == library.Loaded(None, "the compiled kernels give wrong results here")
