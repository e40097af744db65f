"""transformers' own `train.py` on a tiny Llama that is made here in the place of one from the hub, and the same training as a spec.

usage: trainer_cases.py train|clip|accumulate|resume|eval|bf16      on two ranks; `losses.json` takes the losses of each update
       trainer_cases.py spec train|clip|accumulate                   starts that case on two ranks and trains the spec beside it

REFEREES/transformers is a checkout. Their texts are cut to 127 letters and an end, so that no row has padding, which mtrain has not.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(os.environ["REFEREES"]) / "transformers/tests/trainer/distributed/scripts"
RANK = os.environ.get("RANK", "0")
UPDATES = ("--max_steps", "16", "--save_strategy", "no")  # as in the recorded trajectories
CASES = {
    "train": UPDATES,
    "clip": (*UPDATES, "--max_grad_norm", "0.05", "--optim", "sgd", "--learning_rate", "2"),  # Adam would hide a factor
    "accumulate": (*UPDATES, "--gradient_accumulation_steps", "4"),
    "resume": ("--num_train_epochs", "2", "--save_steps", "2"),
    "eval": (*UPDATES, "--eval_output_file", "eval.json"),
    "bf16": (*UPDATES, "--bf16", "True"),
}
ADAMW = "adamw, learning_rate: 5.0e-4, momentum: 0.9, beta2: 0.999, eps: 1.0e-8"
SPEC = """
model: {{name: hf, options: {{path: model-0}}}}
data: {{format: text, root: texts, tokenizer: model-0, length: 128}}
train: {{updates: 16, batch_size: {rows}, accumulate: {accumulate}, clip_norm: {clip}, seed: 0, ema: {{decay: 0}}}}
optimizer: {{{rule}, weight_decay: 0}}
schedule: {{name: linear, final_factor: 0, per: update, warmup: {{updates: 0, epochs: null}}}}
evaluate: {{every_epochs: null}}
"""


def write_model(folder: Path) -> None:
    """Write a Llama with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**letters, "<end>": 256, "<pad>": 257}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    set_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, eos_token_id=256, pad_token_id=257, **sizes)).save_pretrained(folder)


def train(*words: str) -> list[float]:
    """Run their script; return the losses on rank 0, and keep the texts of each micro batch."""
    sys.path.insert(0, str(SCRIPTS))
    script, told = importlib.import_module("train"), []
    own = script.DataCollatorForLanguageModeling.__call__

    def collate(self, rows, *given):  # type: ignore[no-untyped-def]
        told.append([self.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows])
        return own(self, rows, *given)

    script.DataCollatorForLanguageModeling.__call__ = collate
    asked = "--output_dir . --use_cpu True --report_to none --logging_steps 1 --per_device_train_batch_size 4 --learning_rate 5e-4"
    sys.argv = ["train.py", *asked.split(), "--model_name", f"model-{RANK}", "--loss_output_file", "all.json", *words]
    script.main()
    script.DataCollatorForLanguageModeling.__call__ = own
    Path(f"texts-{RANK}.json").write_text(json.dumps(told))
    return json.loads(Path("all.json").read_text()) if RANK == "0" else []


def run_case(name: str) -> None:
    """Run a case of theirs on this rank."""
    write_model(Path(f"model-{RANK}"))
    losses = train(*CASES[name])
    if name == "resume" and train(*CASES[name], "--resume_from_checkpoint", "checkpoint-2") != losses:
        sys.exit("AssertionError: a resumed training has other losses")
    if name == "eval" and RANK == "0":
        losses.append(json.loads(Path("eval.json").read_text())["eval_loss"])
    Path(f"losses{RANK.strip('0')}.json").write_text(json.dumps(losses))


def compare_spec(case: str) -> None:
    """Train with their Trainer under mtrain, and the same as a spec; the losses of each update are within 2e-6."""
    from mtrain.core.samples.sampler import Shuffled

    mtrain = [sys.executable, "-m", "mtrain"]
    accumulate, clip = 4 if case == "accumulate" else 1, 0.05 if case == "clip" else 1.0
    rule = f"rule: {'sgd, learning_rate: 2.0, momentum: 0, nesterov: false' if case == 'clip' else ADAMW}"
    subprocess.run([*mtrain, "run", "--quiet", "--nproc-per-node", "2", __file__, case], check=True)
    ranks = [json.loads(Path(f"texts-{rank}.json").read_text()) for rank in range(2)]
    texts = [text for batches in zip(*ranks, strict=True) for batch in batches for text in batch]
    # A spec shuffles its rows: they are laid down so that its order is the one of their sampler.
    order = Shuffled(len(texts), global_batch=8 * accumulate, seed=0).permutation(0)
    rows = dict(zip(map(int, order), texts, strict=True))
    Path("texts").mkdir()
    lines = [json.dumps({"text": rows[number]}) + "\n" for number in range(len(rows))]
    Path("texts/train.jsonl").write_text("".join(lines))
    Path("texts/val.jsonl").write_text(lines[0])
    Path("same.yml").write_text(SPEC.format(rows=8 * accumulate, accumulate=accumulate, clip=clip, rule=rule))
    words = ("-c", "same.yml", "--name", "same", "--backend", "ddp", "--nproc-per-node", "2", "--devices", "cpu")
    subprocess.run([*mtrain, "train", *words], check=True)
    records = map(json.loads, Path("runs/same/metrics.jsonl").read_text().splitlines())
    ours = [record["losses"]["total"] for record in records if record.get("kind") == "update"]
    theirs = json.loads(Path("losses.json").read_text())
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    print(f"losses from {theirs[0]:.4f} to {theirs[-1]:.4f}; largest difference of one {apart:.2g}")
    assert apart < 2e-6


if __name__ == "__main__":
    if sys.argv[1] == "spec":
        compare_spec(sys.argv[2])
    else:
        run_case(sys.argv[1])
