"""A plain script on torch: three steps a second for ever; a mistake of its own, or something long and healthy, after ten."""

import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

mistake, engine = sys.argv[1], sys.argv[2]


class Ones(torch.utils.data.Dataset):
    """Endless samples; the worker of rank 1 waits for ever in one of them if that is the mistake."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if mistake == "worker" and rank == 1 and index > 60:
            time.sleep(3600)
        return torch.ones(8)


if engine == "deepspeed":
    import deepspeed

    deepspeed.init_distributed("gloo")
else:
    dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 1)
if engine == "deepspeed":
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )[0]
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
loader = torch.utils.data.DataLoader(Ones(), batch_size=2, num_workers=1)


def step(batch):
    loss = model(batch).sum()
    if engine == "deepspeed":
        model.backward(loss)
        model.step()
    else:
        loss.backward()
    time.sleep(0.3)


def work(seconds):
    """Compute without a word."""
    until, numbers = time.monotonic() + seconds, np.random.default_rng(0).random(1 << 20)
    while time.monotonic() < until:
        numbers = np.sort(numbers[::-1])


def save():
    """Write half a gibibyte in pieces, each down to the disk, as to a slow one."""
    with tempfile.TemporaryFile(dir=".") as file:
        for _ in range(64):
            file.write(b"x" * (8 << 20))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.5)


def compile_extension():
    """Compile an extension for the first time."""
    from torch.utils.cpp_extension import load_inline

    source = "torch::Tensor twice(torch::Tensor x) { return x * 2; }"
    load_inline("twice", source, functions=["twice"], build_directory=tempfile.mkdtemp(dir="."))


HEALTHY = {
    "pause": lambda: time.sleep(30),
    "computation": lambda: work(75),
    "evaluation": lambda: work(45) if rank == 0 else None,
    "save": lambda: save() if rank == 0 else None,
    "compilation": lambda: compile_extension() if rank == 0 else None,
}
"""What takes long and is no hang; all ranks meet afterwards."""

for number, batch in enumerate(loader):
    print("step", number, flush=True)
    if number == 10 and mistake in HEALTHY:
        HEALTHY[mistake]()
        dist.barrier()
        print("phase over", flush=True)
    if number == 10 and mistake == "calls":
        dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(1))
    if number == 10 and mistake == "order":
        (dist.broadcast if rank == 1 else dist.all_reduce)(torch.ones(4), **({"src": 0} if rank == 1 else {}))
    if number == 10 and mistake == "shape":
        dist.all_reduce(torch.ones(3 if rank == 1 else 4))
    if number == 10 and mistake == "batches" and rank == 1:
        break
    step(batch)
dist.barrier()
