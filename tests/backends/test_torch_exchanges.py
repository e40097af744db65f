"""Whose gradients an exchange sends, and when, on one rank: of one model among several, and of one micro batch among several."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mtrain.backends._deepspeed.engine import ZeroOptimizer
from mtrain.backends._fsdp import internals
from mtrain.backends._fsdp.engine import FsdpExchange
from mtrain.backends._fsdp.sharding import OwnParts, without_values
from mtrain.backends._torch.ddp_engine import DeterministicBucketsDDP, _Exchange
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.scripts.after_backward import AfterBackward
from mtrain.backends.engine import LocalCollective
from mtrain.core.overriding import override
from mtrain.errors import LaunchError, SpecError
from tests.backends.recipes import recipe


class _Two(LocalCollective):
    """This rank of two, of which the other one has no gradients."""

    size = 2

    def all_reduce(self, x: Any, op: str) -> Any:
        return super().all_reduce(x, op)  # type: ignore[arg-type]


def test_gradients_of_an_own_order_are_means_over_the_ranks() -> None:
    model = nn.Linear(2, 1)
    model(torch.tensor([[2.0, 4.0]])).sum().backward()
    AfterBackward(dict(model.named_parameters()), _Two()).finish()  # type: ignore[arg-type]
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    assert (model.weight.grad.tolist(), model.bias.grad.tolist()) == ([[1.0, 2.0]], [0.5])


def test_ddp_exchanges_in_the_last_micro_batch_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DeterministicBucketsDDP(nn.Linear(2, 1), rehearse=False)
        exchange = _Exchange(wrapped, None)
        sent = []
        for last in (False, True):
            with exchange.during(last=last):
                sent.append(wrapped.require_backward_grad_sync)
        wrapped.release()
    finally:
        dist.destroy_process_group()
    assert sent == [False, True]


@pytest.mark.parametrize("own_order", [False, True])
def test_fsdp_keeps_the_last_weights_of_a_forward_pass_for_the_backward_pass(own_order: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for unit in (*model, model):
            internals.shard(unit, init_device_mesh("cpu", (1,)))
        exchange = FsdpExchange(model, [model])
        exchange.own_order = own_order
        with exchange.during(last=True):
            model(torch.ones(1, 2))
            inside = [isinstance(layer.weight, DTensor) for layer in model]
        after = [isinstance(layer.weight, DTensor) for layer in model]
        del model, exchange, unit
        internals.forget_meshes()
    finally:
        dist.destroy_process_group()
    assert inside == [True, own_order]
    assert after == [True, True], "a change to the parts takes effect"


@pytest.mark.parametrize("own_order", [False, True])
def test_zero_takes_the_gradients_of_its_own_model_alone_where_the_script_orders_passes(own_order: bool) -> None:
    called: list[str] = []
    exchange = SimpleNamespace(
        backward=lambda loss, **_: called.append("backward"),
        backward_alone=lambda loss, **_: called.append("backward_alone"),
    )
    optimizer: Any = SimpleNamespace(_zero_exchange=exchange, _recipe=SimpleNamespace(own_order=own_order))
    ZeroOptimizer._differentiate(optimizer, torch.zeros(()))
    assert called == ["backward_alone" if own_order else "backward"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_tensor_group_takes_its_own_part(rank: int) -> None:
    layout: Any = SimpleNamespace(mesh=SimpleNamespace(shard=1, size=2))
    parts, model = OwnParts(layout, rank=rank, target=torch.device("cpu")), nn.Linear(2, 4, bias=False)
    whole = model.weight.detach().clone()
    boxes: Any = {"weight": SimpleNamespace(held=[slice(0, 2), slice(2, 4)])}
    spread: Any = SimpleNamespace(part=lambda weight, box, is_even: weight.detach()[box].clone(), fill_rest=nullcontext)
    weights = without_values(model)
    parts.take(model, weights, boxes, spread)
    (part,) = parts._parts.values()
    assert torch.equal(part, whole[2 * rank : 2 * rank + 2])


class _Halves(_Two):
    """Two ranks whose library adds up in one way for every operation, and knows no bfloat16."""

    def __init__(self, *, adds_up: bool) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []
        self._adds_up = adds_up

    def all_reduce(self, x: Any, op: str) -> Any:
        if x.dtype == torch.bfloat16:
            raise ValueError("Tensor type torch.BFloat16Tensor is not supported.")
        self.types.append(x.dtype)
        total = x + 2
        return total / 2 if op == "mean" and self._adds_up else total

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value]


class RoundedEngine(TorchEngine):
    """Gradients are sent as float16 besides."""

    @override
    def exchanged_halves(self, model: nn.Module) -> set[torch.dtype]:
        return super().exchanged_halves(model) | {torch.float16}


def _build(collective: Any, dtype: torch.dtype, engine: type[TorchEngine] = TorchEngine) -> None:
    settings = recipe(own_model=True, precision="fp32")
    engine(collective, torch.device("cpu")).build_model(lambda: nn.Linear(2, 1).to(dtype), settings)


def test_gradients_of_half_precision_are_added_up_before_they_are_trained_with() -> None:
    sums = _Halves(adds_up=True)
    _build(sums, torch.float16)
    _build(sums, torch.float32, RoundedEngine)
    assert sums.types == [torch.float16] * 4
    _build(sums, torch.float32)
    assert len(sums.types) == 4
    for dtype, engine in ((torch.float16, TorchEngine), (torch.float32, RoundedEngine)):
        with pytest.raises(LaunchError, match=r"the mean of float16 on the device is \[3.0, 3.0\], where 1.5 is right"):
            _build(_Halves(adds_up=False), dtype, engine)


def test_a_type_that_the_library_cannot_add_up_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"backend torch: .* trained parameters of bfloat16, .*; keep them in float32, or use ddp"
    ):
        _build(_Halves(adds_up=True), torch.bfloat16)
