"""Causal language models of transformers: mtrain's loss is theirs, documents stay apart, and others are refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.core.interfaces.model import WeightsFolder
from mtrain.errors import CheckpointError, PluginError, SpecError
from mtrain_language import publishing
from mtrain_language.base_weights import digest_of
from mtrain_language.documents import Document
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions
from mtrain_language.packing import pack
from mtrain_language.source import RowSource
from mtrain_language.tokens import Bytes

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
}


@pytest.fixture(autouse=True)
def bound():
    bind(torch_nn, torch_ops)


def built(config, *, attention="eager", vocabulary=257, length=32, **options):
    details = {"vocabulary": vocabulary, "end": 256, "length": length}
    task = Task(kind="language", class_names=(), image_size=0, global_batch=2, details=details)
    torch.manual_seed(0)
    return HuggingFaceModel(HuggingFaceOptions(config=config, attention=attention, **options)).build(task, OneRank())


def batch_of(*texts, length=16):
    rows = pack([Document(text) for text in texts], Bytes(), length=length)
    source = RowSource(rows)
    batch = source.collate([source.sample(0, index) for index in range(len(source))])
    return {name: torch.from_numpy(array) for name, array in batch.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_loss_of_one_document_is_that_of_transformers(config, attention):
    model = built(config, attention=attention).double().train().requires_grad_(False)
    batch = batch_of("fifteen letters")
    batch["scale"] = 1 / (batch["labels"] >= 0).sum(dim=1)
    theirs = model(input_ids=batch["tokens"], labels=batch["tokens"], use_cache=False).loss
    assert float(model(batch)["total"]) == pytest.approx(float(theirs), rel=2e-7)  # theirs is computed in float32
    assert model(batch)["total"].dtype == torch.float64


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_document_is_computed_as_if_it_were_alone_in_its_row(config):
    model = built(config).double().eval().requires_grad_(False)
    together, alone = batch_of("seven..", "second.", length=16), batch_of("second.", length=8)
    output, lone = model(together), model(alone)
    first = model(batch_of("seven..", length=8))
    assert float(output["nll"][0]) == pytest.approx(float(first["nll"][0] + lone["nll"][0]), rel=1e-6)
    assert int(output["count"][0]) == 14


def test_sums_of_evaluation_are_those_of_a_loop():
    model = built(CONFIGS["llama"]).double().eval().requires_grad_(False)
    batch = batch_of("some text", "more of it, and more", "end", length=12)
    output = model(batch)
    logits = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
    for row in range(len(batch["tokens"])):
        known = [place for place in range(12) if batch["labels"][row, place] >= 0]
        wanted = [-torch.log_softmax(logits[row, place], 0)[batch["labels"][row, place]] for place in known]
        assert float(output["nll"][row]) == pytest.approx(float(sum(wanted)), rel=1e-12)
        right = sum(int(logits[row, place].argmax()) == int(batch["labels"][row, place]) for place in known)
        assert (int(output["count"][row]), int(output["right"][row])) == (len(known), right)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "should predict"),
        ({"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, "other documents"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "resnet"}, "'resnet' is no causal language model"),
        ({**CONFIGS["llama"], "vocab_size": 100}, "has 100 tokens, and data.tokenizer 257"),
        ({**CONFIGS["llama"], "max_position_embeddings": 8}, "data.length: 32 tokens, and the model takes at most 8"),
    ],
)
def test_a_model_that_would_learn_something_else_is_refused(config, said):
    with pytest.raises((SpecError, PluginError), match=said):
        built(config, attention=None)


def test_a_model_is_continued_until_its_document_ends():
    model = built(CONFIGS["llama"]).eval()
    tokens = torch.tensor([[1, 2, 3, 256]])
    setting = torch.tensor([[3, 5, 256, 0, 1_000_000]])
    output = model({"tokens": tokens, "generate": setting, "index": torch.tensor([0])})["continued"]
    asked = tokens[:, :3]
    for token in output[0]:
        logits = model(input_ids=asked, use_cache=False).logits
        assert int(logits[0, -1].argmax()) == int(token)
        asked = torch.cat([asked, token.reshape(1, 1)], dim=1)
    assert output.shape == (1, 5)


def test_weights_above_a_size_are_written_as_several_files_that_transformers_and_a_job_read(tmp_path: Path):
    """Written over an export with one file, and replaced by one file again: nothing of the other stays."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS["llama"]
    model, folder = built(config).eval(), tmp_path / "m"
    arrays = {name: np.ascontiguousarray(x.numpy()) for name, x in model.state_dict().items()}
    plugin = HuggingFaceModel(HuggingFaceOptions(config=config))
    request = WeightsFolder(path=folder, arrays=arrays, labels={"tokenizer": "bytes"})
    publishing.write_folder(plugin, request)
    with pytest.raises(CheckpointError, match="is not empty; give --force"):
        publishing.write_folder(plugin, request)
    digest = digest_of(folder)
    limit = sum(array.nbytes for array in arrays.values()) / 3
    names = publishing.write_folder(plugin, replace(request, force=True, max_file_bytes=limit))
    files = [name for name in names if name.endswith(".safetensors")]
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) >= 3
    assert all(len(load_file(folder / name)) == 1 or (folder / name).stat().st_size <= limit + 4096 for name in files)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {name: set(load_file(folder / name)) for name in files} == {
        name: {key for key, file in index["weight_map"].items() if file == name} for name in files
    }
    assert digest_of(folder) == digest
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.tensor([[*b"some text"]])
    assert torch.equal(loaded(tokens).logits, model(input_ids=tokens).logits)
    again = built({}, path=str(folder))
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())
    names = publishing.write_folder(plugin, replace(request, force=True))
    assert [name for name in names if name.startswith("model")] == ["model.safetensors"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_folder_that_is_written_is_the_model_for_transformers(config, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = built(config).eval()
    arrays = {name: np.ascontiguousarray(x.numpy()) for name, x in model.state_dict().items()}
    labels = {"tokenizer": "bytes", "end_token": None}
    request = WeightsFolder(path=tmp_path / "m", arrays=arrays, labels=labels)
    names = publishing.write_folder(HuggingFaceModel(HuggingFaceOptions(config=config)), request)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    stored = load_file(tmp_path / "m/model.safetensors")
    assert set(arrays) - set(stored) == ({"lm_head.weight"} if config["model_type"] == "gpt2" else set())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    tokens = torch.tensor([[*b"some text"]])
    assert torch.equal(loaded(tokens).logits, model(input_ids=tokens).logits)
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path / "m"), "Grüße,\t世界\0\n "
    assert tokenizer(text).input_ids == Bytes().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == Bytes().end
    again = built({}, path=str(tmp_path / "m"))  # and mtrain goes on from it
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())
    fresh = built({}, path=str(tmp_path / "m"), from_scratch=True)
    weight = next(name for name in arrays if name.endswith(("mlp.c_fc.weight", "q_proj.weight")))
    torch.manual_seed(1)
    other = HuggingFaceModel(HuggingFaceOptions(path=str(tmp_path / "m"), from_scratch=True))
    details = {"vocabulary": 257, "end": 256, "length": 32}
    task = Task(kind="language", class_names=(), image_size=0, global_batch=2, details=details)
    assert not torch.equal(other.build(task, OneRank()).state_dict()[weight], fresh.state_dict()[weight])
