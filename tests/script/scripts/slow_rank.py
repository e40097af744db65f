"""Train so that each update takes a known time; one rank, if any, takes three times as long."""

import argparse
import shutil
import time
from pathlib import Path

import torch

import mtrain

parser = argparse.ArgumentParser()
parser.add_argument("--slow-rank", type=int)
parser.add_argument("--updates", type=int, default=40)
arguments = parser.parse_args()

data = torch.utils.data.TensorDataset(torch.ones(96, 4))
with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: torch.nn.Linear(4, 1), optimizer=mtrain.AdamW(learning_rate=1e-3, weight_decay=0.0)
    )
    for (inputs,) in session.batches(data, global_batch=6, updates=arguments.updates):
        time.sleep(0.18 if session.rank == arguments.slow_rank else 0.06)
        optimizer.update(model(inputs).square().mean())
    # The job removes what Prometheus is told of a rank when it ends.
    for live in Path().glob(f"runs/*/live/rank-{session.rank}.json"):
        shutil.copy(live, f"live-{session.rank}.json")
