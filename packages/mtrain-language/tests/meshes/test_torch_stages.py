"""Which stage of a pipeline holds what, without ranks, and numbers that are known later."""

import pytest
import torch
from torch import nn

from mtrain.core.update.measures import Measures
from mtrain.errors import SpecError
from mtrain_language import network
from mtrain_language.meshes.pipeline import Later
from mtrain_language.meshes.stages import divide, keep

SIZES = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": 1}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}


def _model(settings: dict[str, object]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**settings, **SIZES)
    return network.adapt(transformers.AutoModelForCausalLM.from_config(config), path="here")


def test_blocks_are_divided_evenly_and_the_rest_by_the_order_of_calls():
    division = divide(_model(LLAMA), 3)
    assert [len(group) for group in division.blocks] == [2, 2, 1]
    assert division.parts[0] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert division.parts[2] == ["model.layers.4", "model.norm", "lm_head"]
    assert division.holders["model.layers.3.mlp.up_proj.weight"] == [1]
    assert (division.ties, division.width) == ([], 16)


def test_a_tied_embedding_is_on_the_first_and_on_the_last_stage():
    division = divide(_model(GPT2), 2)
    assert division.parts[0][:2] == ["transformer.wte", "transformer.wpe"]
    assert division.ties == [["transformer.wte.weight", "lm_head.weight"]]
    assert division.holders["lm_head.weight"] == division.holders["transformer.wte.weight"] == [0, 1]
    assert division.holders["transformer.wpe.weight"] == [0]


@pytest.mark.parametrize("settings", [LLAMA, GPT2])
def test_stages_one_after_the_other_compute_what_the_model_computes(settings):
    """Without ranks: each stage gets what the one before has left."""
    tokens = torch.arange(20).view(2, 10)
    torch.manual_seed(3)
    expected = _model(settings).eval()(input_ids=tokens, use_cache=False).logits
    hidden = torch.empty(0)
    for stage in range(3):
        torch.manual_seed(3)
        model = _model(settings).eval()
        division = divide(model, 3)
        keep(model, division, stage=stage)
        first, last = (model.get_submodule(division.blocks[stage][place]) for place in (0, -1))
        given = hidden
        if stage:
            first.register_forward_pre_hook(lambda module, inputs, given=given: (given, *inputs[1:]))
        left = []
        last.register_forward_hook(lambda module, inputs, output, left=left: left.append(output))
        logits = model(input_ids=tokens, use_cache=False).logits
        hidden = left[0]
        held = {name for name, x in model.named_parameters() if not x.is_meta}
        assert held <= {name for name, stages in division.holders.items() if stage in stages}
    assert torch.equal(logits, expected)


def test_a_weight_that_blocks_of_two_stages_share_is_refused():
    """Only the first and the last stage add up the gradients of what both hold."""
    model = _model(LLAMA)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[3].mlp.up_proj.weight
    with pytest.raises(SpecError, match=r"layers\.1\.mlp\.up_proj\.weight belongs to other stages"):
        divide(model, 3)


def test_a_stage_without_trained_weights_is_refused_on_every_rank():
    """A refusal on the ranks of that stage alone would leave the others waiting."""
    model = _model(GPT2)
    for name, x in model.named_parameters():
        x.requires_grad = ".h.1." not in name
    with pytest.raises(SpecError, match="3 given, but nothing of stage 2 is trained"):
        divide(model, 3)


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(SpecError, match="has 3 blocks, of which each stage needs one; give at most 3"):
        divide(_model(GPT2), 4)
    with pytest.raises(SpecError, match="Sequential is no causal language model"):
        divide(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)


def test_a_loss_that_is_known_later_is_a_metric_of_its_update():
    known: list[list[float]] = [[], []]
    measures = Measures(summed=True)
    for place in range(2):
        measures.add("total", Later(known[place]) * 2.0, weight=0.5)
    known[0].append(1.0)
    known[1].append(4.0)
    assert measures.read(2) == [2.5]
