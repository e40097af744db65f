# ruff: noqa: TID251
"""A training on one process or several, with a mistake: the loss that it reports and derives is summed over ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

is_launched = dist.is_torchelastic_launched()
if is_launched:
    dist.init_process_group("gloo")
rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_launched else (0, 1)
torch.manual_seed(0)
inputs = torch.randn(20, 16, 8)
targets = inputs.sum(-1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
parallel = DistributedDataParallel(model) if is_launched else model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch, wanted in zip(inputs, targets, strict=True):
    part = slice(rank, None, ranks)
    loss = torch.nn.functional.mse_loss(parallel(batch[part]), wanted[part]) * ranks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if is_launched:
    dist.destroy_process_group()
