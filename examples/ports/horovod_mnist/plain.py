"""Horovod's MNIST example in one process, on the digits of scikit-learn: `python plain.py`.

In the form of https://github.com/horovod/horovod/blob/master/examples/pytorch/pytorch_mnist.py without Horovod.
"""

import common
import torch
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train, evaluate, and save the weights."""
    torch.manual_seed(common.SEED)
    train_set = common.Digits(train=True)
    train_sampler = DistributedSampler(train_set, num_replicas=1, rank=0)
    train_loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH, sampler=train_sampler)
    test_set = common.Digits(train=False)
    test_loader = DataLoader(test_set, batch_size=1000)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(common.EPOCHS):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(data).argmax(1) == target).sum().item() for data, target in test_loader)
    print(f"accuracy {right / len(test_set):.3f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
