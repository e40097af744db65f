"""The most bytes that a plan says a rank holds at a time, beside those that torch allocated in a job of two ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.own_model.runs import command, trained

SPEC = """
model: {name: traced, options: {attention: sdpa, config: {model_type: llama, vocab_size: 2048, hidden_size: 128,
  intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}}}
data: {format: text, root: texts, options: {text: a}, length: 64, split: 0.2}
train: {updates: 4, batch_size: 32, ema: {decay: 0.99}, clip_norm: 1.0}
optimizer: {rule: adamw, learning_rate: 0.0001}
evaluate: {every_epochs: null}
checkpoint: {every_epochs: null, every_updates: null}
"""
MIB = 1 << 20


def _allocated(here: Path) -> float:
    """Return the most MiB that were allocated at a time, and not before the profile began."""
    events = json.loads((here / "allocated.json").read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]") / MIB


def _planned(here: Path, *words: str) -> float:
    """Return the most MiB of the plan, without weights, moments and average, which are there before a pass begins."""
    plan = command(here, "plan", "-c", "spec.yml", *words)
    assert plan.returncode == 0, plan.stdout + plan.stderr
    line = next(line for line in plan.stdout.splitlines() if "memory per rank" in line)
    held = sum(float(value) for value in re.findall(r"([\d.]+) MiB (?:weights|moments|average)", line))
    (most,) = re.findall(r"at most ([\d.]+) MiB", line)
    return float(most) - held


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["blocks", "model"])
def test_a_rank_allocates_what_the_plan_says(tmp_path: Path, unit: str) -> None:
    (tmp_path / "texts").mkdir()
    rows = [
        {"a": f"{a} times {b} is {a * b}, and that is all that there is to say about it"}
        for a in range(99)
        for b in range(9)
    ]
    (tmp_path / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "traced.py").write_text((Path(__file__).parent / "traced.py").read_text())
    (tmp_path / "plugins.toml").write_text('[models.traced]\nmodule = "traced:Traced"\n')
    (tmp_path / "spec.yml").write_text(SPEC)
    words = ["--backend", "fsdp", "--nproc-per-node", "2", "--devices", "cpu"]
    words += ["-o", "parallel.shard=2", "-o", f"backend.options.unit={unit}"]
    planned = _planned(tmp_path, *words)
    trained(tmp_path, "run", tmp_path / "spec.yml", *words)
    allocated = _allocated(tmp_path)
    print(f"{unit}: planned {planned:.1f} MiB, allocated {allocated:.1f} MiB, ratio {planned / allocated:.3f}")
    assert planned == pytest.approx(allocated, rel=0.05)
