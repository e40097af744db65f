"""The image classifier of Lightning Fabric, on digits: `fabric run --accelerator cpu --devices 2 --strategy ddp peer.py`.

In the form of https://github.com/Lightning-AI/pytorch-lightning/tree/master/examples/fabric/image_classifier
(train_fabric.py). The batch of a rank is its share of the global batch, so that training is the same for every number
of ranks.
"""

import common
import torch
from lightning_fabric import Fabric, seed_everything
from torch.nn.functional import nll_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and save the weights."""
    fabric = Fabric()
    seed_everything(common.SEED)
    train_set = common.Digits(train=True)
    test_set = common.Digits(train=False)
    train_loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH // fabric.world_size)
    test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(common.EPOCHS):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(data).argmax(1) == target).sum() for data, target in test_loader)
    right = fabric.all_reduce(right, reduce_op="sum")
    fabric.print(f"accuracy {right.item() / len(test_set):.3f}")
    fabric.save("weights.pt", model.state_dict())


if __name__ == "__main__":
    main()
