"""Horovod's MNIST example, on the digits of scikit-learn: `horovodrun -np 2 --gloo python peer.py`.

In the form of https://github.com/horovod/horovod/blob/master/examples/pytorch/pytorch_mnist.py, with the batch of a
rank, and not the learning rate, depending on the number of ranks, so that training is the same for every number of ranks.
"""

import common
import horovod.torch as hvd
import torch
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train, evaluate, and save the weights."""
    hvd.init()
    torch.manual_seed(common.SEED)
    train_set = common.Digits(train=True)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH // hvd.size(), sampler=train_sampler)
    test_set = common.Digits(train=False)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=1000, sampler=test_sampler)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
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
    accuracy = hvd.allreduce(torch.tensor(right / len(test_sampler)), name="accuracy").item()
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f}")
        torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
