"""The bytes that a plan says the backward pass needs, beside those that autograd keeps of a real micro batch."""

from typing import Any

import pytest
import torch

from mtrain.backends._fsdp.units import Unit, units
from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Mesh, Task
from mtrain_language.meshes import activations, fullest, stage_memory
from mtrain_language.meshes.internals import LiveBytes
from mtrain_language.meshes.pipeline import Stage
from mtrain_language.meshes.stages import divide, keep
from mtrain_language.meshes.tensor import whole_plan
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 512,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
}  # fmt: skip
TASK = Task(
    kind="language", class_names=(), image_size=0, global_batch=4, details={"vocabulary": 257, "end": 256, "length": 96}
)
ONE = Mesh(replicate=1, shard=1, tensor=1)


@pytest.fixture(autouse=True)
def bound() -> None:
    bind(torch_nn, torch_ops)


def _plugin(config: dict[str, Any], attention: str) -> HuggingFaceModel:
    return HuggingFaceModel(HuggingFaceOptions(config=config, attention=attention))


def _planned(config: dict[str, Any], attention: str, mesh: Mesh, *, rows: int = 4) -> int:
    plugin = _plugin(config, attention)
    with torch.device("meta"):
        model = plugin.without_values(TASK)
    plan = whole_plan(model, mesh) if mesh.tensor > 1 else {}
    found = activations.kept_bytes(model, plugin.blank_batch(TASK, rows=rows), plan, mesh)
    assert found is not None
    return found


def _batch() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(40), torch.arange(56)]).repeat(4, 1)
    tokens = torch.arange(4 * 96).view(4, 96) % 257
    return {"tokens": tokens, "positions": positions, "labels": tokens, "scale": torch.ones(4, dtype=torch.float64)}


def _measured(config: dict[str, Any], attention: str) -> int:
    model: Any = _plugin(config, attention).build(TASK, OneRank()).train()
    batch = _batch()
    counter = activations.Counter([*model.parameters(), *model.buffers()])
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda x: x):
        model(batch)["total"].backward()
    return counter.bytes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_what_is_planned_is_kept(config: dict[str, Any], attention: str) -> None:
    planned, measured = _planned(config, attention, ONE), _measured(config, attention)
    print(f"{config['model_type']}, {attention}: planned {planned}, kept {measured}, ratio {planned / measured:.3f}")
    assert planned == pytest.approx(measured, rel=0.05)


def test_a_tensor_group_keeps_less_and_with_texts_divided_nearly_its_share() -> None:
    one = _planned(LLAMA, "sdpa", ONE)
    two = _planned(LLAMA, "sdpa", Mesh(replicate=1, shard=1, tensor=2))
    divided = _planned(LLAMA, "sdpa", Mesh(replicate=1, shard=1, tensor=2, sequence=True))
    print(f"of one rank's: tensor 2 {two / one:.2f}, with sequence {divided / one:.2f}")
    assert one / 2 < divided < two < one
    assert _planned(LLAMA, "sdpa", ONE, rows=8) == pytest.approx(2 * one, rel=0.01)


def _most(unit: Unit, *, shards: int = 1, passes: int = 1, config: dict[str, Any] = LLAMA) -> tuple[int, int]:
    """Return the most bytes of a rank, and the bytes of all weights."""
    plugin = _plugin(config, "sdpa")
    with torch.device("meta"):
        model: Any = plugin.without_values(TASK)
    batch = plugin.blank_batch(TASK, rows=4)
    parts = units(model, unit)
    activations.kept_bytes(model, batch, {}, ONE)
    found = fullest.most_bytes(model, batch, parts, shards=shards, passes=passes)
    assert found is not None
    return found, sum(x.numel() * x.element_size() for x in model.parameters())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_most_bytes_at_a_time_are_those_of_a_pass_with_values(config: dict[str, Any]) -> None:
    """One rank, one unit: FSDP adds a copy of the weights, and until they are exchanged one of the gradients."""
    planned, weights = _most("model", config=config)
    model: Any = _plugin(config, "sdpa").build(TASK, OneRank()).train()
    batch = _batch()
    live = LiveBytes([*model.parameters(), *model.buffers()])
    with live:
        model(batch)["total"].backward()
    print(f"{config['model_type']}: planned {planned - weights}, held {live.most}")
    assert planned - weights == pytest.approx(live.most, rel=0.05)


def test_smaller_units_need_less_and_gradients_that_stay_need_more() -> None:
    by_blocks, weights = _most("blocks", shards=2)
    whole, _ = _most("model", shards=2)
    assert by_blocks < whole - weights, "the whole model is in two pieces of memory at a time"
    assert _most("blocks", shards=2, passes=3)[0] == pytest.approx(by_blocks + weights, rel=0.01)


STAGES = 3
HIDDEN_BYTES = 4 * 96 * 64 * 4
"""What a stage hands on of a micro batch of 4 rows of 96 tokens, with 64 numbers each."""


def _planned_stage(config: dict[str, Any], stage: int, *, passes: int, **mesh: Any) -> stage_memory.StageMemory:
    plugin = _plugin(config, "sdpa")
    with torch.device("meta"):
        model: Any = plugin.without_values(TASK)
    lengths = Mesh(**{"replicate": 1, "shard": 1, "tensor": 1, "pipeline": STAGES, **mesh})
    plan = whole_plan(model, lengths) if lengths.tensor > 1 else {}
    batch = plugin.blank_batch(TASK, rows=4)
    part = stage_memory.stage_of(model, plan, lengths, stage=stage)
    found = stage_memory.of_stage(part, batch, lengths, unit="blocks", passes=passes)
    assert found is not None
    return found


def _kept_by_stage(config: dict[str, Any], number: int, *, ahead: int) -> int:
    """Return the bytes that autograd keeps of ``ahead`` forward passes through a stage with values, without what is received."""
    model: Any = _plugin(config, "sdpa").build(TASK, OneRank()).train()
    division = divide(model, STAGES)
    keep(model, division, stage=number)
    stage = Stage(model, division, number=number, precision="fp32", group=None)
    stage.watch()
    received = [torch.randn(4, 96, 64, requires_grad=True) for _ in range(ahead if number else 0)]
    counter = activations.Counter([*model.parameters(), *model.buffers(), *received])
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda x: x):
        outputs = [stage(*received[place : place + 1], **_batch()) for place in range(ahead)]
    assert len(outputs) == ahead
    return counter.bytes


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_stage_keeps_what_is_planned(config: dict[str, Any]) -> None:
    """Of six micro batches: three on the first stage, two on the second, one on the last, and the pieces for what comes from neighbours."""
    for stage, ahead, neighbours in ((0, 3, 1), (1, 2, 2), (2, 1, 1)):
        planned = _planned_stage(config, stage, passes=6).activations
        measured = _kept_by_stage(config, stage, ahead=ahead) + 6 * neighbours * HIDDEN_BYTES
        print(f"{config['model_type']}, stage {stage + 1} of 3: planned {planned}, kept {measured}")
        assert planned == measured


def test_stages_keep_all_micro_batches_if_these_are_fewer_than_stages() -> None:
    """The schedule is GPipe then."""
    for stage, neighbours in ((0, 1), (1, 2), (2, 1)):
        one, two = (_planned_stage(LLAMA, stage, passes=passes).activations for passes in (1, 2))
        assert two == 2 * one
        assert one > neighbours * HIDDEN_BYTES


def test_a_tensor_group_of_a_stage_keeps_less_and_with_texts_divided_nearly_its_share() -> None:
    for stage in range(STAGES):
        one = _planned_stage(LLAMA, stage, passes=6).activations
        two = _planned_stage(LLAMA, stage, passes=6, tensor=2).activations
        divided = _planned_stage(LLAMA, stage, passes=6, tensor=2, sequence=True).activations
        print(f"stage {stage + 1} of 3, of one rank's: tensor 2 {two / one:.2f}, with sequence {divided / one:.2f}")
        assert one / 2 < divided < two < one


def test_a_stage_holds_most_where_its_micro_batches_are_ahead_or_its_gradients_are_whole() -> None:
    most = [_planned_stage(LLAMA, stage, passes=6) for stage in range(STAGES)]
    assert all(memory.most > memory.activations for memory in most)
    more = _planned_stage(LLAMA, 0, passes=12)
    samples = 2 * 6 * (3 * 4 * 96 * 8 + 4 * 8)
    assert more.most == most[0].most + 6 * HIDDEN_BYTES + samples, "later turns are like the second one"
