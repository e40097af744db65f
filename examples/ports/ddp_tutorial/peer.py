"""The training loop of torch's DDP tutorial: `torchrun --nproc-per-node 2 peer.py`.

In the form of https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series (multigpu_torchrun.py),
on CPUs. The batch of a rank is its share of the global batch, so that training is the same for every number of ranks.
"""

import common
import torch
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train, and save the weights."""
    init_process_group(backend="gloo")
    torch.manual_seed(common.SEED)
    train_set = common.Points()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH // get_world_size(), sampler=sampler)
    model = DDP(common.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(common.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
    if get_rank() == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    destroy_process_group()


if __name__ == "__main__":
    main()
