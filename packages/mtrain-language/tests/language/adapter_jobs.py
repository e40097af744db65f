"""Jobs that train adapters, and the same training by a plain loop of torch and peft."""

import json
from pathlib import Path

import torch
from safetensors.numpy import load_file

from mtrain.core.interfaces import SplitRequest
from mtrain.core.samples.sampler import Shuffled
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.tokens import Bytes

UPDATES = 8
DECAY = 0.8
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SPEC = f"""
model:
  name: hf
  options:
    path: base
    attention: eager
    lora: {{rank: 4, alpha: 6, targets: [c_attn, mlp.c_proj]}}
data: {{format: text, root: texts, options: {{text: a, prompt: q}}, length: 24, split: 0.2}}
train: {{updates: {UPDATES}, batch_size: 12, precision: fp64, clip_norm: 0.02, seed: 5, ema: {{decay: {DECAY}, ramp: 0}}}}
optimizer:
  rule: adamw
  learning_rate: 0.02
  weight_decay: 0.1
  groups: [{{match: lora_A, weight_decay: 0.0}}, {{match: ''}}]
evaluate: {{every_epochs: null}}
checkpoint: {{every_epochs: null, every_updates: 4, keep_last: 9}}
generate: {{tokens: 12}}
"""
LAYERS = ("attn.c_attn", "mlp.c_proj")
ADAPTERS = {
    f"transformer.h.{block}.{layer}.lora_{side}.default.weight" for block in (0, 1) for layer in LAYERS for side in "AB"
}


def write(here: Path) -> Path:
    """Write the model ``base``, ``texts`` of sums, and ``lora.yml`` into a folder."""
    rows = [{"q": f"{a} and {b * 'i'} make ", "a": f"{a + b}{'.' * (a % 7)}"} for a in range(60) for b in range(4)]
    (here / "texts").mkdir()
    (here / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "lora.yml").write_text(SPEC)
    write_base(here / "base", seed=1)
    return here


def write_base(folder: Path, *, seed: int, **options: object) -> None:
    """Write a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=257,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=64,
        **NO_DROPOUT,
        bos_token_id=None,
        eos_token_id=256,
    )
    GPT2LMHeadModel(config).save_pretrained(folder, **options)


def plain_loop(here: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the averaged adapters, by name in the module, of a loop of torch and peft alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    documents = TextFiles(TextOptions(text="a", prompt="q")).read(SplitRequest(split="all", root=here / "texts"))
    rows = pack(documents.divide(0.2, seed=0)[0].items, Bytes(), length=24)
    order = Shuffled(len(rows), global_batch=12, seed=5)
    torch.manual_seed(5)
    base = GPT2LMHeadModel.from_pretrained(here / "base", attn_implementation="eager")
    targets = ["c_attn", "mlp.c_proj"]
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).double().train()
    named = {name.removeprefix("base_model.model."): x for name, x in model.named_parameters() if x.requires_grad}
    sides = [[x for name, x in named.items() if f"lora_{side}" in name] for side in "AB"]
    groups = [{"params": sides[0], "weight_decay": 0.0}, {"params": sides[1], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    average = {name: x.detach().clone() for name, x in named.items()}
    found, clipped = [], []
    for update in range(UPDATES):
        indices = order.global_batch_indices(*divmod(update, order.updates_per_epoch))
        tokens, positions, labels = (
            torch.from_numpy(array[indices]).long() for array in (rows.tokens, rows.positions, rows.labels)
        )
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NONE)
        optimizer.zero_grad()
        loss.backward()
        clipped.append(float(torch.nn.utils.clip_grad_norm_(named.values(), 0.02)) > 0.02)
        optimizer.step()
        for name, x in named.items():
            average[name].mul_(DECAY).add_(x.detach(), alpha=1 - DECAY)
        found.append(float(loss.detach()))
    assert any(clipped), "a norm that is never too large would not show how it is taken"
    return found, average


def arrays_of(here: Path, name: str, part: str, *, update: int = UPDATES) -> dict[str, torch.Tensor]:
    """Return the arrays of a part of a checkpoint."""
    file = here / f"runs/{name}/checkpoints/step-{update:08}/{part}.safetensors"
    return {key.removeprefix("/"): torch.from_numpy(array) for key, array in load_file(file).items()}
