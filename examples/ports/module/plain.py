"""A module in the form of Lightning's, trained by a short loop in one process: `python plain.py`."""

import common
import torch
from torch.utils.data import DataLoader


def main() -> None:
    """Train as the module says, evaluate, and save the weights."""
    torch.manual_seed(common.SEED)
    train_loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
    test_set = common.Digits(train=False)
    test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
    module = common.Classifier()
    configured = module.configure_optimizers()
    for _ in range(common.EPOCHS):
        module.train()
        for index, batch in enumerate(train_loader):
            configured["optimizer"].zero_grad()
            module.training_step(batch, index).backward()
            configured["optimizer"].step()
        configured["lr_scheduler"].step()
        module.eval()
        right = 0
        with torch.no_grad():
            for index, batch in enumerate(test_loader):
                predicted, true = module.validation_step(batch, index)
                right += (predicted == true).sum().item()
        print(f"accuracy {right / len(test_set):.3f}")
    torch.save(module.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
