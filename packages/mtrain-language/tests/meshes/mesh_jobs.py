"""Jobs on meshes, in float64, and what they have learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.checkpoint import store
from mtrain_kit import training
from tests.own_model.runs import trained

SIZES = "vocab_size: 260, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
LLAMA_LIKE = f"{SIZES}, max_position_embeddings: 64"
CONFIGS = {
    "llama": f"model_type: llama, {LLAMA_LIKE}",
    "tied": f"model_type: llama, tie_word_embeddings: true, {LLAMA_LIKE}",
    "qwen3": f"model_type: qwen3, head_dim: 8, {LLAMA_LIKE}",
    "gemma2": f"model_type: gemma2, head_dim: 8, {LLAMA_LIKE}",
    "gemma3": f"model_type: gemma3_text, head_dim: 8, {LLAMA_LIKE}",
    "gpt2": "model_type: gpt2, vocab_size: 260, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, resid_pdrop: 0.0, "
    "embd_pdrop: 0.0, attn_pdrop: 0.0",
}
"""Configurations of small models; GPT-2 and Gemma tie their embeddings, as transformers does by default."""
GPT2_PLAN = "parallel.plan={transformer.h.*.mlp.c_fc: colwise, transformer.h.*.mlp.c_proj: rowwise, transformer.wte: embedding_rowwise}"
MODELS = {
    **{name: f"config: {{{config}}}" for name, config in CONFIGS.items()},
    "lora": "path: base, lora: {rank: 4, alpha: 6}",
}
"""Options of the model by configuration; ``lora``: adapters on every layer of a Llama."""
DEEP = {
    f"{count} blocks": f"config: {{model_type: llama, {LLAMA_LIKE.replace('layers: 2', f'layers: {count}')}}}"
    for count in (4, 5)
}
"""The same of Llamas for more than two stages."""
SPEC = """
model: {{name: lifted, options: {{attention: {attention}, {options}}}}}
data: {{format: text, root: texts, options: {{text: a, prompt: q}}, length: 24, split: 0.2}}
train: {{updates: {updates}, batch_size: 12, precision: fp64, clip_norm: 0.5, seed: 5, ema: {{decay: 0.9, ramp: 4}}}}
optimizer:
  rule: adamw
  learning_rate: 0.003
  weight_decay: 0.1
  groups: [{{match: 'norm|ln_|bias', weight_decay: 0.0}}, {{match: ''}}]
evaluate: {{every_epochs: null}}
checkpoint: {{every_epochs: null, every_updates: 4, keep_last: 99}}
"""
MESHES = {
    "tensor 2": ("fsdp", 2, ["parallel.tensor=2"]),
    "tensor 2, sequence": ("fsdp", 2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "shard 2 x tensor 2": ("fsdp", 4, ["parallel.shard=2", "parallel.tensor=2"]),
    "replicate 2 x tensor 2": ("fsdp", 4, ["parallel.replicate=2", "parallel.tensor=2"]),
    "replicate 2 x shard 2": ("fsdp", 4, ["parallel.replicate=2", "parallel.shard=2"]),
    "shard 2 x tensor 2, sequence": ("fsdp", 4, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline 2": ("fsdp", 2, ["parallel.pipeline=2"]),
    "pipeline 2 x tensor 2": ("fsdp", 4, ["parallel.pipeline=2", "parallel.tensor=2"]),
    "pipeline 2 x tensor 2, sequence": ("fsdp", 4, ["parallel={pipeline: 2, tensor: 2, sequence: true}"]),
    "pipeline 2 x shard 2": ("fsdp", 4, ["parallel.pipeline=2", "parallel.shard=2"]),
    "pipeline 3": ("fsdp", 3, ["parallel.pipeline=3"]),
    "pipeline 4": ("fsdp", 4, ["parallel.pipeline=4"]),
    "fsdp 2": ("fsdp", 2, []),
    "ddp 2": ("ddp", 2, []),
    "ZeRO-3": ("deepspeed", 2, ["backend.options.stage=3"]),
    "one rank": ("solo", 1, []),
}

NO_MESH = [
    "parallel.replicate=1",
    "parallel.shard=null",
    "parallel.tensor=1",
    "parallel.sequence=false",
    "parallel.pipeline=1",
]


def prepare(here: Path, *, updates: int) -> None:
    """Write texts, the plugin and a spec for each of ``CONFIGS`` into the folder ``here``."""
    (here / "texts").mkdir()
    rows = [{"q": f"{a} times {b} is ", "a": f"{a * b}{'.' * (a % 7)}"} for a in range(60) for b in range(4)]
    (here / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "lifted.py").write_text((Path(__file__).parent / "lifted.py").read_text())
    (here / "plugins.toml").write_text('[models.lifted]\nmodule = "lifted:Lifted"\n')
    write_base(here / "base")
    for name, options in {**MODELS, **DEEP}.items():
        (here / f"{name}.yml").write_text(
            SPEC.format(attention="eager" if name == "gemma2" else "sdpa", options=options, updates=updates)
        )


def write_base(folder: Path) -> None:
    """Write the Llama on which adapters are trained, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    settings = dict(pair.split(": ") for pair in LLAMA_LIKE.split(", "))
    config = LlamaConfig(**{key: int(value) for key, value in settings.items()}, bos_token_id=None, eos_token_id=256)
    LlamaForCausalLM(config).save_pretrained(folder)


def train(here: Path, name: str, config: str, mesh: str, *words: str) -> dict[str, Any]:
    """Train a model on a mesh of ``MESHES`` in the run folder ``name``; return the run's summary."""
    backend, ranks, values = MESHES[mesh]
    plan = [GPT2_PLAN] if config == "gpt2" and any("tensor" in value for value in values) else []
    # A job that is resumed on other ranks has to say so: its spec is that of the run.
    others = NO_MESH if "--resume" in words else []
    options = [word for value in (*others, *values, *plan) for word in ("-o", value)]
    start = ["--devices", "cpu", "--backend", backend, "--nproc-per-node", str(ranks)]
    return trained(here, name, here / f"{config}.yml", *start, *options, *words)


def learned(here: Path, name: str, *, update: int | None = None) -> dict[str, Any]:
    """Return weights, averages and moments of the newest checkpoint of a run, or of that of ``update``."""
    folder = here / "runs" / name / "checkpoints"
    chosen = store.newest(folder) if update is None else next(folder.glob(f"*{update:08d}"))
    assert chosen is not None
    return training.flat(store.load(chosen).state)


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest absolute difference between two states with the same names and shapes."""
    assert one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape for name in one)
    return max(float(np.abs(one[name].astype(float) - other[name].astype(float)).max(initial=0)) for name in one)
