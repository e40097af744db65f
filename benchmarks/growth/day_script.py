"""Train a stand-in model for a simulated day: an update every five seconds, a checkpoint every ten minutes, an evaluation an hour.

The clock is not waited for, so that the day takes minutes: what a real day counts in updates, records, checkpoints and
evaluations is there in full. Each rank prints what it holds, now and then.
"""

import argparse
import gc
import json
import os
import tracemalloc
from typing import Any

import psutil
import torch

import mtrain

SAMPLES_PER_DAY = 48
"""Lines that a rank prints, one for each simulated half hour."""

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=17_280)
parser.add_argument("--checkpoints", type=int, default=144)
parser.add_argument("--evaluations", type=int, default=24)
arguments = parser.parse_args()


def error(predictions: Any, targets: Any) -> float:
    """Return the mean of the squares."""
    return float(((predictions - targets) ** 2).mean())


data = torch.utils.data.TensorDataset(torch.ones(4096, 8), torch.ones(4096, 1))
scored = torch.utils.data.TensorDataset(torch.ones(256, 8), torch.ones(256, 1))
process = psutil.Process()
tracemalloc.start()
with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: torch.nn.Linear(8, 1), optimizer=mtrain.AdamW(learning_rate=1e-4, weight_decay=0.0)
    )
    every = arguments.updates // SAMPLES_PER_DAY
    with open(f"held-{session.rank}.jsonl", "w") as file:
        for number, (inputs, wanted) in enumerate(session.batches(data, global_batch=8, updates=arguments.updates), 1):
            optimizer.update((model(inputs) - wanted).square().mean())
            if number % (arguments.updates // arguments.evaluations) == 0:
                session.evaluate(model, scored, metric=error, batch_size=32)
            if number % (arguments.updates // arguments.checkpoints) == 0:
                session.save()
            if number % every == 0:
                gc.collect()
                held = {
                    "update": number,
                    "rss_mib": process.memory_info().rss / (1 << 20),
                    "python_kib": tracemalloc.get_traced_memory()[0] / 1024,
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": process.num_threads(),
                }
                print(json.dumps(held), file=file, flush=True)
