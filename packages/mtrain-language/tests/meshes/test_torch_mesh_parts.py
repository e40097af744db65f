"""Meshes without ranks: where parts lie, random numbers of a tensor group, and the figures of a plan."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from mtrain.backends._fsdp.layout import MeshLayout
from mtrain.backends._torch.sharded.shards import held_by, sent_length
from mtrain.backends.fsdp import Fsdp
from mtrain.core.interfaces import Mesh, Recipe
from mtrain.core.ranks.meshes import mesh_of
from mtrain.errors import SpecError
from mtrain.jobs.plan.mesh import layout_words, rows
from mtrain.spec import config
from mtrain.spec.model import Spec
from mtrain_language.meshes import tensor_random
from mtrain_language.meshes.plan import Estimate, estimate, estimates
from mtrain_language.meshes.tensor_adapters import with_adapters
from mtrain_language.meshes.tensor_plan import plan_of, with_ties
from mtrain_language.meshes.tensor_styles import output_of, share, short_length


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("lengths", [(1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_parts_of_a_mesh_cover_an_array_once(axis, lengths):
    mesh = Mesh(replicate=lengths[0], shard=lengths[1], tensor=lengths[2])
    boxes = MeshLayout(mesh, ranks=None).boxes({"a": (6, 4)}, {} if axis is None else {"a": axis})["a"]
    counts = torch.zeros(6, 4)
    for rank in range(mesh.size):
        if sent_length(rank, boxes):
            assert sent_length(rank, boxes) == held_by(rank, boxes, counts).numel()
            held_by(rank, boxes, counts).add_(1)
    assert torch.equal(counts, torch.ones(6, 4))


@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("axis", [None, 1])
def test_parts_of_stages_cover_an_array_once(axis, stages):
    """Also one that two stages hold, as a tied embedding."""
    mesh = Mesh(replicate=2, shard=2, tensor=2, pipeline=3)
    boxes = MeshLayout(mesh, ranks=None).boxes({"a": (6, 4)}, {} if axis is None else {"a": axis}, {"a": stages})["a"]
    counts, holders = torch.zeros(6, 4), set()
    for rank in range(mesh.size):
        part = held_by(rank, boxes, counts)
        if part.numel():
            holders.add(mesh.stage(rank))
        if sent_length(rank, boxes):
            part.add_(1)
    assert torch.equal(counts, torch.ones(6, 4))
    assert holders == set(stages)


def test_ranks_of_a_pipeline_have_the_same_samples():
    mesh = Mesh(replicate=1, shard=2, tensor=2, pipeline=2)
    assert mesh.size == 8
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(mesh.readers) == [0, 2]
    words = layout_words(mesh)
    assert (
        words
        == "replicate 1 x shard 2 x tensor 2 x pipeline 2; stages: ranks 0-3, 4-7; tensor groups: ranks 0-1, 2-3, 4-5, 6-7"
    )


def test_a_part_is_cut_by_the_tensor_group_first_and_then_by_shards():
    boxes = MeshLayout(Mesh(replicate=1, shard=2, tensor=2), ranks=None).boxes({"a": (8, 6)}, {"a": 0})["a"]
    assert boxes.held == (((0, 2), (0, 6)), ((4, 6), (0, 6)), ((2, 4), (0, 6)), ((6, 8), (0, 6)))


class _Half(nn.Module):
    """A feed-forward layer that records what it draws inside and behind the layers that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.inside = self.behind = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.inside = torch.rand(8)
        out = self.down(hidden)
        self.behind = torch.rand(8)
        return out


def _drawn(place: int, plan: dict[str, str]) -> list[torch.Tensor]:
    half = _Half()
    tensor_random.separate(half, plan, place=place, device=torch.device("cpu"))
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        half(torch.ones(1, 4))
        found += [half.inside, half.behind]
    return found


def test_ranks_of_a_tensor_group_drop_alike_outside_of_shared_layers_and_apart_inside():
    plan = {"up": "colwise", "down": "rowwise"}
    one, two, again = _drawn(0, plan), _drawn(1, plan), _drawn(1, plan)
    assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [False, True, False, True]
    assert not torch.equal(one[0], one[2])
    assert not torch.equal(two[0], two[2])
    assert all(torch.equal(a, b) for a, b in zip(two, again, strict=True))
    same = [torch.equal(a, b) for a, b in zip(_drawn(0, {}), _drawn(1, {}), strict=True)]
    assert all(same), "the fault that this test is for: equal masks on all ranks of a group"


def _adapted(**options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, **options), model)


def test_of_adapters_a_plan_cuts_what_lies_on_the_side_of_the_cut():
    plan = {"up": "colwise", "down": "rowwise", "embed": "embedding_rowwise"}
    assert with_adapters(plan, _adapted(target_modules=["up", "down"])) == {
        "up.base_layer": "colwise",
        "up.lora_B.default": "colwise",
        "down.base_layer": "rowwise",
        "down.lora_A.default": "rowwise",
        "embed": "embedding_rowwise",
    }
    with pytest.raises(
        SpecError, match=r"embed \(Embedding\) is shared by the ranks of a tensor group, and cannot have adapters"
    ):
        with_adapters(plan, _adapted(target_modules=["embed"]))


def _masks(place: int) -> list[torch.Tensor]:
    """What a rank's adapters drop before the layers cut by columns and by rows, and what is drawn behind them."""
    model = _adapted(target_modules=["up", "down"], lora_dropout=0.5).train()
    parent = nn.ModuleDict({"block": model})
    tensor_random.separate(
        parent,
        {"block.up.base_layer": "colwise", "block.down.base_layer": "rowwise"},
        place=place,
        device=torch.device("cpu"),
    )
    masks: list[torch.Tensor] = []
    for name in ("up", "down"):
        dropout = model.get_submodule(f"{name}.lora_dropout.default")
        dropout.register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    torch.manual_seed(3)
    model["down"](model["up"](torch.ones(9, 4)))
    return [*masks, torch.rand(8)]


def test_adapters_drop_alike_what_all_ranks_of_a_group_have_and_apart_what_each_has_alone():
    same = [torch.equal(a, b) for a, b in zip(_masks(0), _masks(1), strict=True)]
    assert same == [True, False, True]


def test_a_plan_shares_an_embedding_as_the_output_layer_that_has_its_weight():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    assert with_ties({"head": "colwise_gather_output"}, model)["embed"] == "embedding_rowwise"
    assert with_ties({"embed": "embedding_rowwise"}, model)["head"] == "colwise_gather_output"
    with pytest.raises(SpecError, match="embed and head have one weight, and are not shared alike"):
        with_ties({"head": "rowwise"}, model)


def test_the_plan_of_a_spec_comes_before_those_of_the_model():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.parallelize_plan = {"a": "colwise"}
    model.tp_plan = {"layers.*.b": "rowwise"}
    assert plan_of(model, Mesh(replicate=1, shard=1, tensor=2)) == {"a": "colwise"}
    assert plan_of(model, Mesh(replicate=1, shard=1, tensor=2, plan={"b": "rowwise"})) == {"b": "rowwise"}
    model.parallelize_plan = {"a": "moe_tp_experts"}
    with pytest.raises(SpecError, match="shares a in the way 'moe_tp_experts', which is not known here"):
        plan_of(model, Mesh(replicate=1, shard=1, tensor=2))


@pytest.mark.parametrize(("ranks", "length"), [(1, 16), (2, 16), (3, 18), (8, 16), (32, 32)])
def test_models_are_compared_on_a_text_that_a_tensor_group_divides(ranks, length):
    assert short_length(ranks) == length


def test_a_style_that_rearranges_values_is_refused():
    class Own(ColwiseParallel):
        pass

    with pytest.raises(SpecError, match=r"parallelize_plan: 0 is to be shared by Own"):
        share(nn.Sequential(nn.Linear(2, 2)), {"0": Own()}, None)


def test_models_are_compared_without_tensorfloat_32(monkeypatch):
    matmul, seen = SimpleNamespace(allow_tf32=True), []
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)

    class Answer(nn.Linear):
        config = SimpleNamespace(vocab_size=4)
        tp_plan = None

        def forward(self, input_ids, use_cache):
            seen.append(matmul.allow_tf32)
            return SimpleNamespace(logits=self.weight)

    assert output_of(Answer(2, 2), length=16).shape == (2, 2)
    assert seen == [False]
    assert matmul.allow_tf32


def test_a_plan_counts_what_a_rank_holds():
    spec = Spec.model_validate(
        {"train": {"updates": 1, "batch_size": 8, "accumulate": 2, "ema": {}}, "optimizer": {"rule": "adamw"}}
        | {"parallel": {"shard": 2, "tensor": 2}}
    )
    mesh = Mesh(replicate=1, shard=2, tensor=2)
    arrays = [["a.w", [8, 4], True, True, "a"], ["n.w", [4], False, True, ""]]
    found = estimate(spec, mesh, arrays)
    assert found.weights_bytes == (8 * 4 / 2 + 4) / 2 * 4
    assert (found.moments_bytes, found.average_bytes) == (2 * found.weights_bytes, found.weights_bytes)
    assert found.gathered_bytes == (2 * 8 * 4 / 2 + 4) * 4
    assert layout_words(mesh) == "replicate 1 x shard 2 x tensor 2; tensor groups: ranks 0-1, 2-3"


def test_the_base_of_adapters_is_held_and_gathered_and_not_averaged():
    spec = Spec.model_validate({"train": {"updates": 1, "batch_size": 8, "ema": {}}, "optimizer": {"rule": "adamw"}})
    rows = [["a.base", [8, 4], False, False, "a"], ["a.lora_A", [2, 4], False, True, "a"]]
    found = estimate(spec, Mesh(replicate=2, shard=1, tensor=1), rows)
    assert found.weights_bytes == 4 * (8 * 4 + 2 * 4)
    assert found.gradients_bytes == found.average_bytes == 4 * 2 * 4


@pytest.mark.job
def test_a_plan_counts_masters_in_float32_and_nothing_of_what_is_frozen(tmp_path, monkeypatch):
    """Whatever the type of a model's files, and whether or not its first block is trained."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)

    def found(dtype: str, freeze: str) -> Estimate:
        (tmp_path / "small.yml").write_text(
            "model: {name: hf, options: {attention: sdpa, config: {model_type: llama, vocab_size: 64, hidden_size: 32, "
            f"intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, dtype: {dtype}}}}}}}\n"
            f"data: {{format: text, root: ., length: 16}}\ntrain: {{updates: 1, batch_size: 16, freeze: [{freeze}]}}\n"
            "optimizer: {rule: adamw}\nparallel: {shard: 2}\nbackend: {name: fsdp}\n"
        )
        loaded = config.load("small.yml")
        (one,) = estimates(loaded, mesh_of(loaded.spec, size=2), size=2)
        return one

    whole = found("float32", "")
    assert found("bfloat16", "") == whole
    frozen = found("float32", "embed_tokens")
    assert frozen.weights_bytes == whole.weights_bytes
    assert frozen.gradients_bytes == whole.gradients_bytes - 4 * 64 * 32 / 2


@pytest.mark.job
@pytest.mark.smoke
def test_a_plan_says_what_each_stage_holds_and_names_stages_together_that_are_alike(tmp_path, monkeypatch):
    """Four stages of one block each, of a Llama without a tied embedding."""
    pytest.importorskip("transformers")
    (tmp_path / "small.yml").write_text(
        "model: {name: hf, options: {attention: sdpa, config: {model_type: llama, vocab_size: 1024, hidden_size: 32, "
        "intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2}}}\n"
        "data: {format: text, root: ., length: 16}\n"
        "train: {updates: 1, batch_size: 16, accumulate: 8}\n"
        "optimizer: {rule: sgd}\nparallel: {pipeline: 4}\nbackend: {name: fsdp}\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = config.load("small.yml")
    found = estimates(loaded, mesh_of(loaded.spec, size=4), size=4)
    block = 4 * (32 * (32 + 16 + 16 + 32 + 3 * 64) + 2 * 32)
    assert [each.weights_bytes for each in found] == [block + 4 * 1024 * 32, block, block, block + 4 * (1024 * 32 + 32)]
    assert "; stages 2-3: 0.0 MiB weights" in rows(loaded, size=4)["memory per rank"]
    with pytest.raises(SpecError, match="the model has 4 blocks"):
        rows(config.load("small.yml", overrides=["parallel.pipeline=5"]), size=5)


@pytest.mark.parametrize(("blocks", "given"), [((), "true"), (("layers",), "blocks")])
def test_fsdp_refuses_what_was_given_for_compilation(blocks, given):
    recipe = Recipe(rule="adamw", groups=(), micro_batch=1, compile=True, compile_blocks=blocks)
    with pytest.raises(SpecError, match=f"train.compile: {given} given with backend fsdp; use false"):
        Fsdp(Fsdp.Options()).check(recipe, size=2, on_cpu=True)
