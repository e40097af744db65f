"""Which parts of a model the backend fsdp gathers one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from mtrain.backends._fsdp import internals
from mtrain.backends._fsdp.units import blocks, units
from mtrain.errors import LaunchError

SIZES = {
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class _Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class _Encoder(nn.Module):
    """Blocks, with an embedding that is larger than one of them and a norm that is smaller."""

    def __init__(self, made: nn.Module, *, tokens: int = 64) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = nn.Embedding(tokens, 8), made, nn.LayerNorm(8)


def _model(made: nn.Module, *, tokens: int = 64) -> nn.Module:
    return nn.ModuleDict({"encoder": _Encoder(made, tokens=tokens), "head": nn.Linear(8, 3)})


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def test_a_model_of_transformers_is_gathered_by_its_blocks_and_large_layers() -> None:
    model = _llama()
    assert list(units(model, "children")) == ["model", "lm_head"]
    assert list(units(model, "blocks")) == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model", "lm_head",
    ]  # fmt: skip


def test_a_weight_that_an_embedding_and_the_head_share_belongs_to_the_whole_model() -> None:
    model = _llama(tie_word_embeddings=True)
    found = units(model, "blocks")
    assert list(found) == ["model.layers.0", "model.layers.1", "model.norm"]
    assert not any(weight is model.lm_head.weight for unit in found.values() for weight in unit.parameters())


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_equal_modules_in_a_list_that_hold_most_of_a_model_are_its_blocks(kind: Any) -> None:
    made = kind([_Block(), _Block(), _Block()]) if kind is nn.ModuleList else kind(_Block(), _Block(), _Block())
    model = _model(made)
    layers = [f"encoder.layers.{i}" for i in range(3)]
    assert list(units(model, "blocks")) == ["encoder.embed", *layers, "encoder", "head"]
    assert list(units(model, "children")) == ["encoder", "head"]
    assert units(model, "model") == {}


@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        pytest.param(nn.ModuleList([_Block(), _Block()]), 4096, id="they hold less than half"),
        pytest.param(nn.ModuleList([_Block()]), 4, id="one is no list of equal ones"),
        pytest.param(nn.ModuleList([_Block(), _Encoder(nn.ModuleList())]), 4, id="of two classes"),
        pytest.param(nn.ModuleList([nn.Sequential(_Block()), nn.Sequential(_Block(4))]), 4, id="of two sizes"),
        pytest.param(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 4, id="single layers"),
        pytest.param(nn.ModuleList([nn.ModuleList([_Block()]), nn.ModuleList([_Block()])]), 4, id="lists are not called"),
    ],
)  # fmt: skip
def test_a_model_without_blocks_is_gathered_by_its_children(made: nn.Module, tokens: int) -> None:
    model = _model(made, tokens=tokens)
    assert blocks(model) == []
    assert units(model, "blocks") == units(model, "children")


def test_a_block_whose_weight_is_used_elsewhere_is_no_unit() -> None:
    model: Any = _model(nn.ModuleList([_Block(), _Block(), _Block()]))
    model["encoder"].layers[1].up.weight = model["encoder"].layers[0].up.weight
    # What tied blocks hold besides is not gathered singly either: it is smaller than a block.
    assert list(units(model, "blocks")) == ["encoder.embed", "encoder.layers.2", "encoder", "head"]


def test_each_weight_belongs_to_one_unit() -> None:
    """FSDP gives a weight to the first unit that holds it, so a unit inside another has to come first."""
    for model in (_llama(), _model(nn.ModuleList([_Block(), _Block()]))):
        names = list(units(model, "blocks"))
        assert all(not later.startswith(f"{name}.") for i, name in enumerate(names) for later in names[i + 1 :])


@pytest.mark.parametrize("by_sums", [False, True])
def test_a_torch_whose_exchange_leaves_another_mean_is_refused(by_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 2.8, the mean of gloo was the sum: every gradient was twice too large on two ranks, without an error."""
    group = SimpleNamespace(rank=lambda: 0)
    mesh: Any = SimpleNamespace(
        get_group=lambda axis: group, size=lambda axis: 2, ndim=1, device_type="cpu", mesh_dim_names=("shard",)
    )
    monkeypatch.setattr(internals, "_averages_by_sums", lambda mesh: by_sums)
    factors = {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 0.5}

    def scatter(part: torch.Tensor, given: torch.Tensor, *, op: Any, group: Any) -> None:
        part.copy_(given[: len(part)] * factors[op])

    monkeypatch.setattr(internals, "_scatter", scatter)
    internals.check_averages(mesh)
    factors[dist.ReduceOp.AVG] = 1.0
    factors[dist.ReduceOp.SUM] = 1.0 if not by_sums else 0.5
    with pytest.raises(LaunchError, match="backend fsdp: the mean of gradients"):
        internals.check_averages(mesh)


def test_a_torch_that_moves_parts_of_weights_is_refused() -> None:
    part = torch.zeros(3)
    same = {"a": (part, part[:2]), "empty": (torch.zeros(0), torch.zeros(0))}
    internals.check_same_memory(same)
    with pytest.raises(LaunchError, match=r"this rank's part of b \(1 in all\)"):
        internals.check_same_memory({**same, "b": (part, part.clone())})
