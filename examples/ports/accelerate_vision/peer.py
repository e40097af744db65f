"""Accelerate's vision example, on the digits of scikit-learn: `torchrun --nproc-per-node 2 peer.py`.

In the form of https://github.com/huggingface/accelerate/blob/main/examples/cv_example.py. ``split_batches`` divides
each global batch among the ranks, so that training is the same for every number of ranks.
"""

import common
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader


def main() -> None:
    """Train, evaluate, and save the weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(common.SEED)
    eval_set = common.Digits(train=False)
    train_loader = common.shuffled(common.Digits(train=True))
    eval_loader = DataLoader(eval_set, batch_size=common.GLOBAL_BATCH)
    model = common.network()
    optimizer = common.optimizer_of(model)
    steps = {"epochs": common.EPOCHS, "steps_per_epoch": len(train_loader)}
    scheduler = OneCycleLR(optimizer, max_lr=common.LR, cycle_momentum=False, **steps)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    model, optimizer, train_loader, eval_loader, scheduler = prepared
    for _ in range(common.EPOCHS):
        model.train()
        for batch in train_loader:
            inputs = (batch["image"] - common.MEAN) / common.STD
            loss = cross_entropy(model(inputs), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in eval_loader:
        inputs = (batch["image"] - common.MEAN) / common.STD
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
        right += (predictions == references).sum().item()
    accelerator.print(f"accuracy {right / len(eval_set):.3f}")
    accelerator.save(accelerator.get_state_dict(model), "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
