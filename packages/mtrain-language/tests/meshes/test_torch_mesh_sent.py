"""What a plan says that each rank of a mesh sends, beside what the kernel counts on the rank's connections while it trains."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from mtrain.core.ranks.meshes import mesh_of
from mtrain.spec import config
from mtrain_language.meshes.plan import estimates
from tests.own_model.runs import trained

SPEC = """
model: {name: counted, options: {attention: sdpa, config: {model_type: llama, vocab_size: 1024, hidden_size: 128,
  intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}}}
data: {format: text, root: texts, options: {text: a}, length: 64, split: 0.2}
train: {updates: 5, batch_size: 32, accumulate: 4, clip_norm: 1.0}
optimizer: {rule: adamw, learning_rate: 0.0001}
evaluate: {every_epochs: null}
checkpoint: {every_epochs: null, every_updates: null}
"""
TIED = "model.options.config.tie_word_embeddings=true"


def _sent(here: Path, rank: int) -> float:
    """Return the bytes that a rank sent in one update."""
    totals = [int(line) for line in (here / f"sent-{rank}.txt").read_text().split()]
    assert len(totals) == 5
    return median(after - before for before, after in pairwise(totals[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (2, ["parallel.pipeline=2"]),
        (2, ["parallel.pipeline=2", TIED]),
        (2, ["parallel.pipeline=2", "train.precision=fp64"]),
        (4, ["parallel.pipeline=4"]),
        (4, ["parallel={pipeline: 2, shard: 2}"]),
        (4, ["parallel={pipeline: 2, replicate: 2}"]),
        (4, ["parallel={pipeline: 2, tensor: 2}"]),
        (4, ["parallel={pipeline: 2, tensor: 2, sequence: true}"]),
    ],
)
def test_a_rank_of_a_stage_sends_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, values: list[str]
) -> None:
    (tmp_path / "texts").mkdir()
    rows = [
        {"a": f"{a} times {b} is {a * b}, and that is all that there is to say"} for a in range(99) for b in range(9)
    ]
    (tmp_path / "texts/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "counted.py").write_text((Path(__file__).parent / "counted.py").read_text())
    (tmp_path / "plugins.toml").write_text('[models.counted]\nmodule = "counted:Counted"\n')
    (tmp_path / "spec.yml").write_text(SPEC)
    monkeypatch.setenv("COUNTED_PASSES", "4")
    monkeypatch.chdir(tmp_path)
    words = ["--backend", "fsdp", "--nproc-per-node", str(ranks), "--devices", "cpu"]
    words += [word for value in [*values, "backend.options.device=cpu"] for word in ("-o", value)]
    trained(tmp_path, "run", tmp_path / "spec.yml", *words)
    loaded = config.load(str(tmp_path / "runs/run/spec.yml"))
    mesh = mesh_of(loaded.spec, size=ranks)
    assert mesh is not None
    planned = estimates(loaded, mesh, size=ranks, on_cpu=True)
    assert planned is not None
    for rank in range(ranks):
        found = planned[mesh.stage(rank)]
        said = found.sent_to_shards + found.sent_to_replicas + found.sent_in_group + found.sent_to_stages
        ratio = _sent(tmp_path, rank) / said
        print(f"{values} rank {rank}: planned {said:,.0f}, counted {_sent(tmp_path, rank):,.0f}, {ratio:.4f}")
        # Besides, ranks agree on a few numbers after an update.
        assert 1 <= ratio < 1.01
