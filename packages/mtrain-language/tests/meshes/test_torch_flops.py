"""The operations of a language model are those of the usual formula, and its utilisation is their share of the peak."""

import json

import pytest
import torch

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.commands import main
from mtrain.core.binding import bind
from mtrain.core.interfaces import Task
from mtrain_language.meshes import flops
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions

VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 257, 32, 3, 24, 2
LLAMA = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
TASK = Task(
    kind="language",
    class_names=(),
    image_size=0,
    global_batch=ROWS,
    details={"vocabulary": VOCABULARY, "end": 256, "length": LENGTH},
)


@pytest.fixture(autouse=True)
def _bound() -> None:
    bind(torch_nn, torch_ops)


def plugin(config, **options):
    return HuggingFaceModel(HuggingFaceOptions(config={**config, "vocab_size": VOCABULARY}, **options))


def formula(model: torch.nn.Module) -> int:
    """6 N + 12 layers x width x length for each token, with N the weights of matrix products: embeddings are looked up."""
    layers = [x for x in model.modules() if isinstance(x, torch.nn.Linear) or type(x).__name__ == "Conv1D"]
    matrices = sum(layer.weight.numel() for layer in layers)
    return ROWS * LENGTH * (6 * matrices + 12 * LAYERS * WIDTH * LENGTH)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_count_is_the_formula(config, attention):
    made = plugin(config, attention=attention)
    with torch.device("meta"):
        model = made.without_values(TASK)
    assert model is not None
    found = flops.of_micro_batch(model, made.blank_batch(TASK, rows=ROWS))
    assert found == formula(model)
    assert model.config._attn_implementation == attention
    assert all(x.grad is None for x in model.parameters())
    assert flops.of_plugin(made, TASK, ROWS, []) == found
    forward = flops.of_plugin(made, TASK, ROWS, [r"^(?!.*(lm_head|wte))"])
    assert forward < 0.8 * found  # no gradients of other weights


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["solo", "fsdp"])
def test_a_job_records_its_utilisation(backend, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("some words that come again and again, and again\n" * 20)
    config = {**LLAMA, "vocab_size": VOCABULARY}
    pairs = [
        "model.name=hf", f"model.options.config={config}", "data.format=text", f"data.root={tmp_path}", f"data.length={LENGTH}",
        "train.updates=2", "train.batch_size=4", "report.peak_tflops=0.002", "report.display=verbose",
    ]  # fmt: skip
    argv = [part for pair in pairs for part in ("-o", pair)]
    assert main(["train", "--backend", backend, "--devices", "cpu", "--name", "job", *argv]) == 0, (
        capsys.readouterr().err
    )
    lines = [json.loads(line) for line in (tmp_path / "runs/job/metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["kind"] == "update"]
    count = flops.of_plugin(plugin(LLAMA), TASK, 1, [])
    ranks = next(line["ranks"] for line in lines if line["kind"] == "start")
    for update in updates:
        assert update["mfu"] == pytest.approx(count * update["samples_per_second"] / (ranks * 0.002e12))
    assert f"{100 * updates[-1]['mfu']:.1f}% MFU" in capsys.readouterr().out
