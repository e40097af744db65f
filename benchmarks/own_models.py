"""Compare jobs on models of other people with plain torch loops over the same samples, in float64.

For each model of examples/own-model, the loss of every update is computed by a loop of plain torch, and by mtrain on each
backend with 1, 2 and 3 ranks. The table shows the largest difference. Dropout is on where the model has it: a loop for n
ranks then computes n shares of each batch, each after seeding torch as mtrain does for that share.

    python benchmarks/own_models.py [--updates 12] [--models language,vision] [--backends ddp,fsdp] > table.md
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mtrain.core.samples.sampler import Shuffled
from mtrain.data import trees
from mtrain.data.objects import seeded_sample
from mtrain.spec import config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "own-model"
MODELS = {
    "language": "GPT-2 (transformers)",
    "vision": "ViT (transformers), dropout 0.1",
    "segmentation": "segmentation net",
    "own": "tabular MLP, dropout 0.1",
}
BACKENDS = {
    "ddp": ("--backend", "ddp"),
    "horovod": ("--backend", "horovod"),
    "deepspeed:stage=1": ("--backend", "deepspeed", "-o", "backend.options.stage=1"),
    "deepspeed:stage=3": ("--backend", "deepspeed", "-o", "backend.options.stage=3"),
    "fsdp": ("--backend", "fsdp"),
}
RANKS = (1, 2, 3)


def overrides(updates: int) -> list[str]:
    """Return the values of the spec that all jobs of the table have."""
    return ["train.precision=fp64", f"train.updates={updates}", "evaluate.metrics=[]", "evaluate.enabled=false"]


def named(reference: str) -> type:
    """Return the class that a reference PATH.py:Name names."""
    file, _, name = reference.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def batches(dataset, *, batch_size: int, updates: int, seed: int) -> Iterator[list]:
    """Yield the samples of each update, in mtrain's order and with its random numbers."""
    order = Shuffled(len(dataset), global_batch=batch_size, seed=seed)
    for update in range(updates):
        epoch, position = divmod(update, order.updates_per_epoch)
        yield [
            seeded_sample(dataset, int(index), (seed, epoch, int(index)), torch.manual_seed)
            for index in order.global_batch_indices(epoch, position)
        ]


def as_tensors(samples: list):
    """Return samples as a batch of tensors, with numbers of floating point in float64."""

    def tensor(_: str, value):
        array = torch.as_tensor(np.array(trees.as_array(value)))
        return array.double() if array.is_floating_point() else array

    return trees.map_leaves(trees.collate(samples), tensor)


def plain_losses(name: str, *, updates: int, shares: int) -> list[float]:
    """Train with a plain loop of torch; return the loss of each update.

    Each batch is computed in ``shares`` equal parts, whose random numbers are those of as many ranks.
    """
    spec = config.load(str(EXAMPLE / f"{name}.yml"), overrides=overrides(updates), environ={}).spec
    seed, rule = spec.train.seed, spec.optimizer
    dataset = named(spec.data.format)(**spec.data.options)
    build = named(spec.model.name)
    torch.manual_seed(seed)
    model = build(**spec.model.options).double().train()
    if rule.rule == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=rule.learning_rate, momentum=rule.momentum)
    else:
        betas = (rule.momentum, rule.beta2)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rule.learning_rate, betas=betas, weight_decay=rule.weight_decay
        )
    losses = []
    for update, samples in enumerate(batches(dataset, batch_size=spec.train.batch_size, updates=updates, seed=seed)):
        size, total = len(samples) // shares, 0.0
        for share in range(shares):
            state = np.random.SeedSequence([seed, share, update]).generate_state(1, np.uint64)
            batch = as_tensors(samples[share * size :][:size])
            torch.manual_seed(int(state[0]) >> 1)
            result = model(batch)
            loss = (
                result["total"] if isinstance(result, dict) and "total" in result else getattr(result, "loss", result)
            )
            (loss / shares).backward()
            total += float(loss.detach()) / shares
        if spec.schedule.name == "cosine":
            factor = 0.01 + 0.99 * (1 + np.cos(np.pi * update / updates)) / 2
            optimizer.param_groups[0]["lr"] = rule.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def job_losses(here: Path, name: str, backend: str, ranks: int, *, updates: int) -> list[float]:
    """Train with mtrain; return the loss of each update."""
    run = f"{name}-{backend.replace(':', '-').replace('=', '')}-{ranks}"
    values = [
        *overrides(updates),
        "cluster.threads=1",
        "report.plots=false",
        "report.tensorboard=false",
        "report.display=quiet",
    ]
    line = [sys.executable, "-m", "mtrain", "train", "-c", str(EXAMPLE / f"{name}.yml"), "--name", run]
    line += [*BACKENDS[backend], "--nproc-per-node", str(ranks), *(word for value in values for word in ("-o", value))]
    result = subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise SystemExit(f"{run}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    records = map(json.loads, (here / "runs" / run / "metrics.jsonl").read_text().splitlines())
    return [record["losses"]["total"] for record in records if record["kind"] == "update"]


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference between losses of equal updates."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    backends = arguments.backends.split(",")
    print(f"| model | ranks | {' | '.join(backends)} |\n|---|--:|{'--:|' * len(backends)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            for ranks in RANKS:
                plain = plain_losses(name, updates=arguments.updates, shares=ranks)
                cells = [
                    f"{difference(plain, job_losses(Path(folder), name, backend, ranks, updates=arguments.updates)):.1e}"
                    for backend in backends
                ]
                print(f"| {MODELS[name]} | {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
