"""Train so that each update takes a known time; one rank, if any, takes three times as long."""

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path

import torch
import torch.distributed

import mtrain

calls = []
"""Collectives of torch that were called so far."""


def counted(name):
    called = getattr(torch.distributed, name)

    def call(*args, **kwargs):
        calls.append(name)
        return called(*args, **kwargs)

    setattr(torch.distributed, name, call)


for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor"):
    counted(name)

parser = argparse.ArgumentParser()
parser.add_argument("--slow-rank", type=int)
parser.add_argument("--updates", type=int, default=40)
arguments = parser.parse_args()

data = torch.utils.data.TensorDataset(torch.ones(96, 4))
calls_before = []
"""Number of calls before each update."""
with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: torch.nn.Linear(4, 1), optimizer=mtrain.AdamW(learning_rate=1e-3, weight_decay=0.0)
    )
    for (inputs,) in session.batches(data, global_batch=6, updates=arguments.updates):
        calls_before.append(len(calls))
        time.sleep(0.18 if session.rank == arguments.slow_rank else 0.06)
        optimizer.update(model(inputs).square().mean())
    made = [calls[first:last] for first, last in itertools.pairwise(calls_before)]
    Path(f"collectives-{session.rank}.json").write_text(json.dumps(made))
    # The job removes what Prometheus is told of a rank when it ends.
    for live in Path().glob(f"runs/*/live/rank-{session.rank}.json"):
        shutil.copy(live, f"live-{session.rank}.json")
