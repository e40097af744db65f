"""Accelerate's text example in one process, on docstrings: `python plain.py`.

In the form of https://github.com/huggingface/accelerate/blob/main/examples/nlp_example.py without Accelerate. The
model is evaluated once, at the end.
"""

import common
import torch
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def main() -> None:
    """Train, evaluate, and save the weights."""
    torch.manual_seed(common.SEED)
    eval_set = common.Pairs(train=False)
    train_loader = common.shuffled(common.Pairs(train=True))
    eval_loader = DataLoader(eval_set, batch_size=common.GLOBAL_BATCH)
    model = common.network()
    optimizer = common.optimizer_of(model)
    steps = len(train_loader) * common.EPOCHS
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=common.WARMUP, num_training_steps=steps)
    for _ in range(common.EPOCHS):
        model.train()
        for batch in train_loader:
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in eval_loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        right += (predictions == batch["labels"]).sum().item()
    print(f"accuracy {right / len(eval_set):.3f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
