"""What a plan says of a rank's memory on a mesh, beside what the job's ranks needed.

    python -m benchmarks.mesh_memory [--cases 0,3] [--folder FOLDER]

Each job trains three updates on the CPU, once with freed memory kept for the next update (the default) and once with
``backend.options.keep_memory=false``. The libraries' share is taken off: the same job with a model of a few numbers. The
largest resident set is that of the rank that needed most.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20
SPEC = """
model: {{name: hf, options: {{attention: sdpa, config: {{{config}}}}}}}
data: {{format: python_docs, length: 256}}
train: {{updates: 3, batch_size: 8, ema: {{decay: 0.99}}, clip_norm: 1.0}}
optimizer: {{rule: adamw, learning_rate: 0.0001}}
evaluate: {{enabled: false}}
checkpoint: {{every_epochs: null, every_updates: null}}
report: {{plots: false, tensorboard: false}}
"""
MODELS = {
    "Llama": "model_type: llama, vocab_size: {vocabulary}, hidden_size: {width}, intermediate_size: {inner}, num_hidden_layers: {layers}, "
    "num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 512",
    "GPT-2": "model_type: gpt2, vocab_size: {vocabulary}, n_embd: {width}, n_inner: {inner}, n_layer: {layers}, n_head: 8, "
    "n_positions: 512",
}
LARGE = {"vocabulary": 8192, "width": 512, "inner": 1408, "layers": 8}
SMALL = {"vocabulary": 260, "width": 16, "inner": 16, "layers": 1}
MESHES = {
    "shard 2": [],
    "tensor 2": ["parallel.tensor=2"],
    "tensor 2, sequence": ["parallel.tensor=2", "parallel.sequence=true"],
}
CASES = [("Llama", "shard 2"), ("Llama", "tensor 2"), ("Llama", "tensor 2, sequence"), ("GPT-2", "shard 2")]


def words(folder: Path, model: str, sizes: dict[str, int], mesh: str) -> list[str]:
    """Write a spec, and return what starts its job or shows its plan."""
    spec = folder / f"{model}-{sizes['width']}.yml"
    spec.write_text(SPEC.format(config=MODELS[model].format(**sizes)))
    values = [word for value in MESHES[mesh] or ["parallel.shard=2"] for word in ("-o", value)]
    return ["-c", str(spec), "--backend", "fsdp", "--nproc-per-node", "2", "--devices", "cpu", *values]


def run(folder: Path, *arguments: str) -> str:
    """Run mtrain."""
    process = subprocess.run(
        [sys.executable, "-m", "mtrain", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(process.stdout + process.stderr)
    return process.stdout


def needed(folder: Path, name: str, arguments: list[str]) -> float:
    """Return the largest resident set of a rank, in MiB."""
    run(folder, "train", *arguments, "--name", name)
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return float(max(record.get("memory_bytes") or 0 for record in records)) / MIB


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", default="", help="numbers of rows, such as 0,3; all if none is given")
    parser.add_argument("--folder", default=None, help="where runs are written")
    options = parser.parse_args()
    print("| model | mesh | planned at most, MiB | freed memory | needed, MiB | needed / planned |")
    print("|---|---|--:|---|--:|--:|")
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        wanted = {int(number) for number in options.cases.split(",") if number}
        for number, (model, mesh) in enumerate(CASES):
            if wanted and number not in wanted:
                continue
            arguments = words(folder, model, LARGE, mesh)
            plan = run(folder, "plan", *arguments)
            line = next(line for line in plan.splitlines() if "memory per rank" in line)
            (shown,) = re.findall(r"at most ([\d,.]+) MiB", line)
            planned = float(shown.replace(",", ""))
            small = words(folder, model, SMALL, mesh)
            for said, value in (("kept", "true"), ("returned", "false")):
                freed = ["-o", f"backend.options.keep_memory={value}"]
                found = needed(folder, f"large-{number}-{said}", [*arguments, *freed])
                found -= needed(folder, f"small-{number}-{said}", [*small, *freed])
                print(
                    f"| {model} | {mesh} | {planned:.0f} | {said} | {found:.0f} | {found / planned:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
