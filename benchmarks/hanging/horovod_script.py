"""A plain script on Horovod: three steps a second for ever, or a mistake of its own after ten."""

import itertools
import sys
import time

import horovod.torch as hvd
import torch

mistake = sys.argv[1]
hvd.init()
rank = hvd.rank()
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
for number in itertools.count():
    print("step", number, flush=True)
    if number == 10 and mistake == "calls":
        hvd.barrier() if rank == 1 else hvd.allreduce(torch.ones(1), name="mine")
    if number == 10 and mistake == "order":
        hvd.allreduce(torch.ones(1), name="first" if rank == 1 else "second")
    if number == 10 and mistake == "shape":
        hvd.allreduce(torch.ones(3 if rank == 1 else 4), name="mine")
    if number == 10 and mistake == "batches" and rank == 1:
        break
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.3)
hvd.barrier()
