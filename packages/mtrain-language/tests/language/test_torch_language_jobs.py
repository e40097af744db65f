"""Jobs on language models through the real command line: a plain loop's losses on any ranks, resume, texts, folders."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from mtrain.commands import main
from mtrain.core.interfaces import SplitRequest
from mtrain.core.samples.sampler import Shuffled
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.tokens import Bytes
from tests.own_model.runs import command, losses, refused, trained
from tests.starts import starts_processes

SPEC = """
model:
  name: hf
  options:
    attention: eager
    config: {model_type: gpt2, n_embd: 24, n_layer: 2, n_head: 2, n_positions: 64, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}
data: {format: text, root: texts, options: {text: a, prompt: q}, length: 24, split: 0.2}
train: {updates: 8, batch_size: 12, precision: fp64, clip_norm: 0.5, seed: 5}
optimizer:
  rule: adamw
  learning_rate: 0.01
  weight_decay: 0.1
  groups: [{match: '\\.bias$|ln_', weight_decay: 0.0}, {match: ''}]
evaluate: {every_epochs: null}
checkpoint: {every_epochs: null, every_updates: 4, keep_last: 9}
generate: {tokens: 12}
"""


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory) -> Path:
    """A folder with texts of sums, which are as long as their prompts, or shorter, and ``sums.yml``."""
    here = tmp_path_factory.mktemp("language")
    rows = [{"q": f"{a} and {b * 'i'} make ", "a": f"{a + b}{'.' * (a % 7)}"} for a in range(60) for b in range(4)]
    (here / "texts").mkdir()
    (here / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "sums.yml").write_text(SPEC)
    trained(here, "one", here / "sums.yml", "--backend", "solo")
    return here


def plain_losses(folder: Path, updates: int) -> list[float]:
    """Train the same with a loop of torch and transformers alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    documents = TextFiles(TextOptions(text="a", prompt="q")).read(SplitRequest(split="all", root=folder / "texts"))
    rows = pack(documents.divide(0.2, seed=0)[0].items, Bytes(), length=24)
    order = Shuffled(len(rows), global_batch=12, seed=5)
    assert len({*rows.counts.tolist()}) > 3, "rows of equal counts would not show how tokens are weighted"
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=257, n_embd=24, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").double()
    plain = [x for name, x in model.named_parameters() if name.endswith(".bias") or "ln_" in name]
    decayed = [x for name, x in model.named_parameters() if not (name.endswith(".bias") or "ln_" in name)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    found = []
    for update in range(updates):
        indices = order.global_batch_indices(*divmod(update, order.updates_per_epoch))
        tokens, positions, labels = (
            torch.from_numpy(array[indices]).long() for array in (rows.tokens, rows.positions, rows.labels)
        )
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NONE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def largest_difference(folder: Path, name: str, expected: list[float]) -> float:
    found = losses(folder, name)
    return max(abs(a - b) for a, b in zip(expected, found, strict=True))


@pytest.mark.smoke
def test_one_rank_has_the_losses_of_a_plain_loop(folder):
    assert largest_difference(folder, "one", plain_losses(folder, 8)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", ["--backend", "ddp", "--nproc-per-node", "2", "-o", "train.accumulate=3"]),
        pytest.param("three", ["--backend", "ddp", "--nproc-per-node", "3"], marks=pytest.mark.slow),
        pytest.param("parts", ["--backend", "solo", "-o", "train.accumulate=12"], marks=pytest.mark.slow),
        pytest.param("hvd", ["--backend", "horovod", "--nproc-per-node", "2"], marks=pytest.mark.slow),
        *(
            pytest.param(
                f"zero{stage}",
                ["--backend", "deepspeed", "-o", f"backend.options.stage={stage}", "--nproc-per-node", "2"],
                marks=pytest.mark.slow,
            )
            for stage in (1, 2, 3)
        ),
    ],
)
def test_however_it_is_divided_the_losses_and_metrics_are_those_of_one_rank(folder, name, words):
    summary = trained(folder, name, folder / "sums.yml", *words)
    one = json.loads((folder / "runs/one/summary.json").read_text())
    assert largest_difference(folder, name, losses(folder, "one")) <= 1e-12
    assert summary["last"]["perplexity"] == pytest.approx(one["last"]["perplexity"], rel=1e-12)
    assert summary["last"]["accuracy"] == one["last"]["accuracy"]


@pytest.mark.smoke
def test_a_job_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(folder):
    whole = json.loads((folder / "runs/one/summary.json").read_text())
    shutil.copytree(folder / "runs/one", folder / "runs/again")
    shutil.rmtree(folder / "runs/again/checkpoints/step-00000008")
    result = command(folder, "train", "--resume", "runs/again", "-o", "report.plots=false")
    assert result.returncode == 0, result.stdout + result.stderr
    again = json.loads((folder / "runs/again/summary.json").read_text())
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_a_job_does_not_go_on_with_other_rows_in_the_midst_of_an_epoch(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    resume = ["train", "--resume", "runs/one/checkpoints/step-00000004"]
    texts = Path("texts/sums.jsonl")
    whole = texts.read_text()
    for words, content, said in (
        (["-o", "data.length=32"], whole, "data.length: 32 given, 24 before"),
        (["-o", "data.split_seed=3"], whole, "data.split_seed: 3 given, 0 before"),
        (
            [],
            whole.replace("7", "8"),
            "the samples of the training split are not those of when the checkpoint was written",
        ),
    ):
        texts.write_text(content)
        assert main([*resume, *words]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert "others not at all" in told
        assert "model.weights" in told


def test_evaluate_repeats_the_metrics_and_predict_continues_texts(folder):
    result = command(folder, "evaluate", "runs/one")
    assert result.returncode == 0, result.stdout + result.stderr
    best = json.loads((folder / "runs/one/summary.json").read_text())["best"]
    metrics = json.loads((folder / "runs/one-evaluate/summary.json").read_text())["metrics"]
    assert metrics == {name: best[name] for name in metrics}
    (folder / "sum.txt").write_text("1 and ii make ")
    (folder / "noise.txt").write_bytes(b"\xff\xfe")
    result = command(folder, "predict", "sum.txt", "noise.txt", "--run", "runs/one", "--out", "out")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 texts (1 of 2 skipped) continued" in result.stdout
    (entry,) = json.loads((folder / "out/predictions.json").read_text())
    assert (entry["file_name"], entry["prompt"]) == ("sum.txt", "1 and ii make ")
    assert len(entry["text"].encode()) <= 12


def test_the_weights_leave_as_a_folder_and_come_back_as_a_start(folder):
    from transformers import GPT2LMHeadModel

    result = command(folder, "weights", "export", "runs/one", "--to", "sums-gpt2")
    assert result.returncode == 0, result.stdout + result.stderr
    loaded = GPT2LMHeadModel.from_pretrained(folder / "sums-gpt2")
    assert loaded.config.vocab_size == 257
    words = ["-o", "model.options={path: sums-gpt2}", "-o", "train.updates=1", "--backend", "solo"]
    trained(folder, "from", folder / "sums.yml", *words)
    assert losses(folder, "from")[0] < losses(folder, "one")[0] - 0.5
    told = refused(folder, "weights", "export", "runs/one", "--to", "sums-gpt2")
    assert "--force" in told


@pytest.mark.slow
def test_blocks_that_are_compiled_learn_the_same(folder):
    summary = trained(folder, "compiled", folder / "sums.yml", "--backend", "solo", "-o", "train.compile=blocks")
    difference = largest_difference(folder, "compiled", losses(folder, "one"))
    print(f"compiled by block: {difference:.1e}")
    assert difference <= 1e-10
    one = json.loads((folder / "runs/one/summary.json").read_text())
    assert summary["weights_sha256"] != one["weights_sha256"], "a job that was not compiled has the same bits"


@pytest.mark.slow
def test_conversations_are_learned_and_a_file_is_asked_as_a_user(folder):
    from transformers import AutoTokenizer

    (folder / "talks").mkdir()
    talks = [
        [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": f"{a + b}"}]
        for a in range(30)
        for b in range(4)
    ]
    (folder / "talks/sums.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    data = "data={format: text, root: talks, options: {messages: talk, prompt: null}, chat_template: chatml, length: 60, split: 0.2}"
    chat = ("-o", data, "--backend", "solo", "-o", "train.updates=2")
    trained(folder, "talk", folder / "sums.yml", *chat)
    (folder / "ask.txt").write_text("1 and 2?")
    result = command(folder, "predict", "ask.txt", "--run", "runs/talk", "--out", "answers")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((folder / "answers/predictions.json").read_text())[0]["prompt"] == "1 and 2?"
    result = command(folder, "weights", "export", "runs/talk", "--to", "talk-gpt2")
    assert result.returncode == 0, result.stdout + result.stderr
    text = AutoTokenizer.from_pretrained(folder / "talk-gpt2").apply_chat_template(talks[0], tokenize=False)
    assert text == "<|im_start|>user\n0 and 0?<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"
    told = refused(
        folder, "train", "-c", "sums.yml", "--name", "no-talk", "-o", data.replace("chat_template: chatml, ", "")
    )
    assert "data.chat_template" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "fleet"], "hf is a model of torch"),
        (["-o", "data.names=[a]"], "data.names"),
        (["-o", "data.length=100000"], "data.length: 100000 tokens in a row"),
        (["-o", "data.options.text=answer"], "no field 'answer'"),
        (["-o", "model.options.pat=x"], "model.options.pat"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(folder, words, said):
    assert said in refused(folder, "train", "-c", "sums.yml", "--name", f"no-{os.getpid()}", *words)
