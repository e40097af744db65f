"""A plain script on torch: three steps a second for ever, or a mistake of its own after ten."""

import sys
import time

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


for number, batch in enumerate(loader):
    print("step", number, flush=True)
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
