"""torchtitan's debug model of Llama on 18 meshes beside one rank: 100 updates in float64, and the largest difference.

usage: python -m tests.referees.debug_model FOLDER [UPDATES]      on mtrain's meshes; runs that are in FOLDER are not made anew

The shapes, rule, rates and clipping are those of its configuration `llama3_debugmodel`: 6 blocks of 256 numbers, 16 heads,
2,048 tokens. Texts, their length (16 tokens) and the batch (8) are our own, since its data are not in its package.
"""

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), *map(str, sorted(ROOT.glob("packages/*"))), *map(str, sorted(ROOT.glob("packages/*/src")))]

MOST = 1e-12
MESHES = {
    "shard 2": {"shard": 2},
    "shard 4": {"shard": 4},
    "replicate 2": {"replicate": 2, "shard": 1},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": 1},
    "tensor 4": {"tensor": 4},
    "tensor 4, sequence": {"tensor": 4, "sequence": 1},
    "shard 2 x tensor 2": {"shard": 2, "tensor": 2},
    "shard 2 x tensor 2, sequence": {"shard": 2, "tensor": 2, "sequence": 1},
    "replicate 2 x tensor 2": {"replicate": 2, "shard": 1, "tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "pipeline 4": {"pipeline": 4},
    "pipeline 2 x shard 2": {"pipeline": 2, "shard": 2},
    "pipeline 2 x tensor 2": {"pipeline": 2, "tensor": 2},
    "pipeline 2 x tensor 2, sequence": {"pipeline": 2, "tensor": 2, "sequence": 1},
    "replicate 2 x shard 2 x tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
    "pipeline 2 x shard 2 x tensor 2": {"pipeline": 2, "shard": 2, "tensor": 2},
}
SPEC = """
model:
  name: lifted
  options:
    attention: sdpa
    config: {{model_type: llama, vocab_size: 2048, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 6,
      num_attention_heads: 16, num_key_value_heads: 16, rms_norm_eps: 1.0e-5, max_position_embeddings: 2048,
      rope_parameters: {{rope_type: default, rope_theta: 500000.0}}}}
data: {{format: text, root: texts, options: {{text: a, prompt: q}}, length: 16, split: 0.2}}
train: {{updates: {updates}, batch_size: 8, precision: fp64, clip_norm: 1.0, seed: 42, ema: {{decay: 0}}}}
optimizer: {{rule: adamw, learning_rate: 8.0e-4, momentum: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1}}
schedule: {{name: linear, final_factor: 0, per: update, warmup: {{updates: 2, epochs: null}}}}
evaluate: {{every_epochs: null}}
checkpoint: {{every_epochs: null, every_updates: {updates}, keep_last: 1}}
"""


def ranks(mesh: dict[str, int]) -> int:
    """How many ranks a mesh has."""
    sizes = [mesh.get(key, 1) for key in ("replicate", "shard", "tensor", "pipeline")]
    return sizes[0] * sizes[1] * sizes[2] * sizes[3]


def train(folder: Path, name: str, mesh: tuple[str, int, list[str]], *words: str) -> None:
    """Train on a mesh in the run folder `name`, however long that takes."""
    from tests.own_model.runs import QUIET, command

    backend, count, options = mesh
    start = ["--devices", "cpu", "--backend", backend, "--nproc-per-node", str(count)]
    given = [word for option in options for word in ("-o", option)]
    told = command(folder, "train", "-c", "debug.yml", "--name", name, *QUIET, *start, *given, *words, timeout_s=7200)
    if told.returncode:
        sys.exit(f"{name}: {told.stdout}{told.stderr}")


def main(folder: Path, updates: int) -> int:
    """Train on one rank and on every mesh; print a row of each; 1 where one is further away than 1e-12."""
    from tests.meshes import mesh_jobs

    from tests import warm
    from tests.own_model.runs import losses

    if not folder.exists():
        folder.mkdir(parents=True)
        mesh_jobs.prepare(folder, updates=updates)
        (folder / "debug.yml").write_text(SPEC.format(updates=updates))
    mesh_jobs.MESHES |= {
        name: ("fsdp", ranks(mesh), [f"parallel={json.dumps({'shard': 1, **mesh, 'sequence': 'sequence' in mesh})}"])
        for name, mesh in MESHES.items()
    }
    print("| mesh | ranks | state | losses |\n|---|--:|--:|--:|")
    worst = 0.0
    try:
        for mesh in ("one rank", *MESHES):
            name = mesh.replace(" ", "-").replace(",", "")
            passes = 1 if mesh == "one rank" else 4 if "pipeline 4" in mesh else 2
            if not (folder / "runs" / name / "summary.json").exists():
                shutil.rmtree(folder / "runs" / name, ignore_errors=True)
                train(folder, name, mesh_jobs.MESHES[mesh], "-o", f"train.accumulate={passes}")
            state, loss = mesh_jobs.learned(folder, name), losses(folder, name)
            if mesh == "one rank":
                one = (state, loss)
                continue
            apart = mesh_jobs.largest_difference(one[0], state)
            of_losses = max(abs(a - b) for a, b in zip(one[1], loss, strict=True))
            worst = max(worst, apart, of_losses)
            print(f"| {mesh} | {ranks(MESHES[mesh])} | {apart:.1e} | {of_losses:.1e} |", flush=True)
    finally:
        warm.close()
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), int((*sys.argv[2:], 100)[0])))
