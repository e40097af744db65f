"""Accelerate's text example, on docstrings: `torchrun --nproc-per-node 2 peer.py`.

In the form of https://github.com/huggingface/accelerate/blob/main/examples/nlp_example.py. ``split_batches`` divides
each global batch among the ranks, so that training is the same for every number of ranks.
"""

import common
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def main() -> None:
    """Train, evaluate, and save the weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(common.SEED)
    eval_set = common.Pairs(train=False)
    train_loader = common.shuffled(common.Pairs(train=True))
    eval_loader = DataLoader(eval_set, batch_size=common.GLOBAL_BATCH)
    model = common.network()
    optimizer = common.optimizer_of(model)
    steps = len(train_loader) * common.EPOCHS
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=common.WARMUP, num_training_steps=steps)
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
    model, optimizer, train_loader, eval_loader, scheduler = prepared
    for _ in range(common.EPOCHS):
        model.train()
        for batch in train_loader:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    for batch in eval_loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += (predictions == references).sum().item()
    accelerator.print(f"accuracy {right / len(eval_set):.3f}")
    accelerator.save(accelerator.get_state_dict(model), "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
