"""A plain script for Horovod, as a user writes it; the variable DIVIDED plants a second average."""

import os

import horovod.torch as hvd
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
hvd.init()
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
generator = torch.Generator().manual_seed(3)
images, labels = torch.randn(64, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for update in range(6):
    chosen = (torch.arange(8) + update * 8)[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
    if os.environ.get("DIVIDED"):
        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad /= hvd.size()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()
