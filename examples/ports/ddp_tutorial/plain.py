"""The training loop of torch's DDP tutorial in one process: `python plain.py`.

In the form of https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series (single_gpu.py), with
mse_loss instead of cross_entropy: the cross entropy of the tutorial's single class is 0, and so is its gradient.
"""

import common
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train, and save the weights."""
    torch.manual_seed(common.SEED)
    train_set = common.Points()
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0)
    loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH, sampler=sampler)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(common.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
