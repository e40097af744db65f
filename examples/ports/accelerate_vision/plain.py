"""Accelerate's vision example in one process, on the digits of scikit-learn: `python plain.py`.

In the form of https://github.com/huggingface/accelerate/blob/main/examples/cv_example.py without Accelerate. The
momentum is not cycled with the learning rate, and the model is evaluated once, at the end.
"""

import common
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and save the weights."""
    torch.manual_seed(common.SEED)
    eval_set = common.Digits(train=False)
    train_loader = common.shuffled(common.Digits(train=True))
    eval_loader = DataLoader(eval_set, batch_size=common.GLOBAL_BATCH)
    model = common.network()
    optimizer = common.optimizer_of(model)
    steps = {"epochs": common.EPOCHS, "steps_per_epoch": len(train_loader)}
    scheduler = OneCycleLR(optimizer, max_lr=common.LR, cycle_momentum=False, **steps)
    for _ in range(common.EPOCHS):
        model.train()
        for batch in train_loader:
            inputs = (batch["image"] - common.MEAN) / common.STD
            loss = cross_entropy(model(inputs), batch["label"])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in eval_loader:
        inputs = (batch["image"] - common.MEAN) / common.STD
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        right += (predictions == batch["label"]).sum().item()
    print(f"accuracy {right / len(eval_set):.3f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
