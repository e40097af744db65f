"""The image classifier of Lightning Fabric in one process, on the digits of scikit-learn: `python plain.py`.

In the form of https://github.com/Lightning-AI/pytorch-lightning/tree/master/examples/fabric/image_classifier
(train_torch.py), with SGD in place of Adadelta; the model is evaluated once, at the end.
"""

import common
import torch
from torch.nn.functional import nll_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and save the weights."""
    torch.manual_seed(common.SEED)
    train_set = common.Digits(train=True)
    test_set = common.Digits(train=False)
    train_loader = DataLoader(train_set, batch_size=common.GLOBAL_BATCH)
    test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
    model = common.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(common.EPOCHS):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(data).argmax(1) == target).sum() for data, target in test_loader)
    print(f"accuracy {right.item() / len(test_set):.3f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
