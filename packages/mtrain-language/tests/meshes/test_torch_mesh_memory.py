"""The most bytes that a plan says a rank holds at a time, beside those that torch allocated in a job of two ranks."""

import json
import re
from pathlib import Path

import pytest

from mtrain.core.ranks.meshes import mesh_of
from mtrain.spec import config
from mtrain_language.meshes.plan import estimates
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


def _allocated(here: Path, rank: int) -> float:
    """Return the most MiB that a rank allocated at a time, and not before the profile began."""
    events = json.loads((here / f"allocated-{rank}.json").read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]") / MIB


def _planned(here: Path, *words: str) -> float:
    """Return the most MiB of the plan, without weights, moments and average, which are there before a pass begins."""
    plan = command(here, "plan", "-c", "spec.yml", *words)
    assert plan.returncode == 0, plan.stdout + plan.stderr
    line = next(line for line in plan.stdout.splitlines() if "memory per rank" in line)
    held = sum(float(value) for value in re.findall(r"([\d.]+) MiB (?:weights|moments|average)", line))
    (most,) = re.findall(r"at most ([\d.]+) MiB", line)
    return float(most) - held


def _planned_of_stages(size: int) -> list[float]:
    """Return the same for each stage of the run ``run`` in the current folder."""
    loaded = config.load("runs/run/spec.yml")
    mesh = mesh_of(loaded.spec, size=size)
    assert mesh is not None
    found = estimates(loaded, mesh, size=size, on_cpu=True)
    assert found is not None
    before = [each.weights_bytes + each.moments_bytes + each.average_bytes for each in found]
    return [((each.most_bytes or 0) - held) / MIB for each, held in zip(found, before, strict=True)]


def _prepare(here: Path) -> None:
    (here / "texts").mkdir()
    rows = [
        {"a": f"{a} times {b} is {a * b}, and that is all that there is to say about it"}
        for a in range(99)
        for b in range(9)
    ]
    (here / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "traced.py").write_text((Path(__file__).parent / "traced.py").read_text())
    (here / "plugins.toml").write_text('[models.traced]\nmodule = "traced:Traced"\n')
    (here / "spec.yml").write_text(SPEC)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["blocks", "model"])
def test_a_rank_allocates_what_the_plan_says(tmp_path: Path, unit: str) -> None:
    _prepare(tmp_path)
    words = ["--backend", "fsdp", "--nproc-per-node", "2", "--devices", "cpu"]
    words += ["-o", "parallel.shard=2", "-o", f"backend.options.unit={unit}"]
    planned = _planned(tmp_path, *words)
    trained(tmp_path, "run", tmp_path / "spec.yml", *words)
    allocated = _allocated(tmp_path, 0)
    print(f"{unit}: planned {planned:.1f} MiB, allocated {allocated:.1f} MiB, ratio {planned / allocated:.3f}")
    assert planned == pytest.approx(allocated, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "shards", "passes", "unit"),
    [(2, 1, 4, "blocks"), (2, 1, 4, "model"), (4, 1, 8, "blocks"), (4, 1, 2, "blocks"), (2, 2, 4, "blocks")],
)
def test_a_rank_of_a_stage_allocates_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, shards: int, passes: int, unit: str
) -> None:
    """Two micro batches on four stages go by another schedule."""
    _prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACED_PASSES", str(passes))
    words = ["--backend", "fsdp", "--nproc-per-node", str(stages * shards), "--devices", "cpu"]
    words += ["-o", f"parallel={{pipeline: {stages}, shard: {shards}}}", "-o", f"train.accumulate={passes}"]
    words += ["-o", f"backend.options.unit={unit}"]
    trained(tmp_path, "run", tmp_path / "spec.yml", *words)
    planned = _planned_of_stages(stages * shards)
    received = (
        32 // shards * 64 * 128 * 4 / MIB
    )  # of all micro batches, from one neighbour: there since the first update
    for stage in range(stages):
        allocated = _allocated(tmp_path, stage * shards) + received * ((stage > 0) + (stage < stages - 1))
        ratio = planned[stage] / allocated
        print(f"stage {stage + 1} of {stages}, shard {shards}, {passes} micro batches, {unit}: ", end="")
        print(f"planned {planned[stage]:.1f} MiB, allocated {allocated:.1f} MiB, ratio {ratio:.3f}")
        assert ratio == pytest.approx(1, rel=0.05)
