"""A script of transformers' Trainer as a user writes it: a small GPT-2, prompts of many lengths, labels masked."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 100, (64, 16), generator=generator)
        self.lengths = torch.randint(4, 16, (64,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--deepspeed")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, **none))
arguments = TrainingArguments(
    options.out,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulate,
    max_steps=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    seed=0,
    deepspeed=options.deepspeed,
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Tokens()).train()
