"""How the cost of an update and of checkpoints grows with the parameters of a model and the arrays that they are in.

The model is a stand-in: it has so many arrays and one operation over all of them, so that what remains is the optimizer and
mtrain's own code. Beside it, the same update as a bare loop of torch, by turns in the same process.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

UPDATE_SIZES = (
    (1_000_000, 100),
    (1_000_000, 1_000),
    (1_000_000, 5_000),
    (1_000_000, 20_000),
    (10_000_000, 100),
    (100_000_000, 100),
)
"""(parameters, arrays)"""
CHECKPOINT_SIZES = ((1_000_000, 100), (10_000_000, 100), (100_000_000, 100), (200_000_000, 100), (1_000_000, 20_000))
BLOCKS, UPDATES = 7, 4


def update(parameters: int, arrays: int) -> dict[str, Any]:
    """Measure the CPU time of an update with clipping and AdamW in ``mtrain.session`` and in a bare loop."""
    import torch
    from torch import nn

    import mtrain

    torch.set_num_threads(1)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            each = parameters // arrays
            self.parts = nn.ParameterList([nn.Parameter(torch.full((each,), 1e-3)) for _ in range(arrays)])

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.cat(list(self.parts)).square().sum() * inputs.mean()

    data = torch.utils.data.TensorDataset(torch.ones(4096, 1))
    bare, ready = Many(), torch.ones(4, 1)
    rule = torch.optim.AdamW(bare.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def plain() -> None:
        rule.zero_grad()
        bare(ready).backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        rule.step()

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = ["growth.py"]
        with mtrain.session() as session:
            model, optimizer = session.prepare(
                Many, optimizer=mtrain.AdamW(learning_rate=1e-3, weight_decay=0.01), clip_norm=1.0
            )
            batches = session.batches(data, global_batch=4, updates=(BLOCKS + 1) * UPDATES + 1)

            def ours() -> None:
                (inputs,) = next(batches)
                optimizer.update(model(inputs))

            ours()
            plain()
            for block in range(BLOCKS + 1):
                for name, one in (("ours", ours), ("bare", plain)):
                    began = time.process_time()
                    for _ in range(UPDATES):
                        one()
                    if block:
                        times[name].append((time.process_time() - began) / UPDATES * 1e3)
        os.chdir("/")
    ratios = [a / b for a, b in zip(times["ours"], times["bare"], strict=True)]
    row = {f"{name}_cpu_ms": statistics.median(values) for name, values in times.items()}
    return {"parameters": parameters, "arrays": arrays, **row, "ratio": statistics.median(ratios)}


def checkpoint(parameters: int, arrays: int) -> dict[str, Any]:
    """Measure writing, checking, listing and reading a checkpoint of float32 arrays, beside a plain file of the same size."""
    from mtrain.core.checkpoint import format as files
    from mtrain.core.checkpoint import store
    from mtrain.core.interfaces import Progress, State

    each = parameters // arrays
    weights = {f"layer{number:06d}.weight": np.full(each, number, dtype=np.float32) for number in range(arrays)}
    size_mb = each * arrays * 4 / 1e6
    row: dict[str, Any] = {"parameters": parameters, "arrays": arrays, "mb": size_mb}
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCALE_DISK")) as folder:
        row["plain_write_mb_per_s"] = size_mb / _plain(Path(folder) / "plain", weights)
        checkpoints = store.Checkpoints(Path(folder) / "c", keep_last=1, keep_best=0, asynchronous=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began, cpu = time.perf_counter(), time.process_time()
        checkpoints.save(State(weights=weights), Progress(update=1), score=None, spec={}, extra={})
        row["save_mb_per_s"] = size_mb / (time.perf_counter() - began)
        row["save_cpu_s"] = time.process_time() - cpu
        row["save_peak_more_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        (path,) = store.list_all(Path(folder) / "c")
        for name, act in (
            ("verify", lambda: files.verify(path)),
            ("list", lambda: store.newest(path.parent)),
            ("load", lambda: _read(files.load(path).state.weights)),
        ):
            began = time.process_time()
            act()
            row[f"{name}_cpu_s"] = time.process_time() - began
    row["rss_mib"] = psutil.Process().memory_info().rss / (1 << 20)
    return row


def _plain(path: Path, weights: dict[str, Any]) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        for array in weights.values():
            file.write(memoryview(array).cast("B"))
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _read(weights: Any) -> float:
    """Read every array once, as a restore does."""
    return float(sum(float(np.asarray(weights[name]).sum()) for name in weights))


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.parameters update|checkpoint PARAMETERS ARRAYS``."""
    kind, parameters, arrays = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"update": update, "checkpoint": checkpoint}[kind](parameters, arrays)))


if __name__ == "__main__":
    main()
