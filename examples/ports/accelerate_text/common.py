"""Model and data of Accelerate's text example, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: pairs of sentences from the docstrings of the standard library, in place of GLUE MRPC. The label says whether the
second sentence follows the first one in its text, in place of whether they say the same. Tokens are whole words.
Model: a small BERT from config, in place of the pretrained one. Dropout is 0: its random numbers depend on the number
of ranks. Global batch: 24 samples in place of 16 on each rank. With `--fp64`, plain.py and peer.py compute in
float64; for port.py, `-o train.precision=fp64` does.
"""

import importlib
import inspect
import re
import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, BertConfig

GLOBAL_BATCH, EPOCHS, SEED, LR, WARMUP = 24, 3, 42, 2e-5, 100
TRAINING_PAIRS, EVALUATION_PAIRS, LENGTH = 960, 72, 32
UPDATES = TRAINING_PAIRS // GLOBAL_BATCH * EPOCHS
MODULES = ("argparse", "collections", "csv", "datetime", "decimal", "difflib", "email.message", "fractions", "json",
           "logging", "mailbox", "os", "pathlib", "random", "shutil", "socket", "statistics", "string", "subprocess",
           "tarfile", "textwrap", "threading", "turtle", "unittest.case", "urllib.request", "zipfile")  # fmt: skip
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


def texts() -> list[list[list[str]]]:
    """Return the words of the sentences of each docstring with at least two sentences."""
    found = []
    for module in map(importlib.import_module, MODULES):
        owners = [module, *(value for _, value in sorted(vars(module).items()) if inspect.isclass(value))]
        members = [value for owner in owners for _, value in sorted(vars(owner).items()) if callable(value)]
        for member in members:
            text = getattr(member, "__doc__", None)
            sentences = re.split(r"(?<=[.!?])\s+", text) if isinstance(text, str) else []
            words = [re.findall(r"\w+|[^\w\s]", sentence.lower()) for sentence in sentences]
            found.append([sentence for sentence in words if sentence])
    return [text for text in found if len(text) > 1]


class Pairs(Dataset):
    """Pairs of sentences as token numbers, masks, and labels."""

    def __init__(self, *, train: bool) -> None:
        numbers = np.random.default_rng(0)
        docstrings = texts()
        vocabulary = {word: n for n, word in enumerate(sorted({w for t in docstrings for s in t for w in s}), start=3)}
        assert len(vocabulary) + 3 <= 8192, "the docstrings of this Python have more words than the model has tokens"
        samples = []
        for _ in range(TRAINING_PAIRS + EVALUATION_PAIRS):
            first = docstrings[numbers.integers(len(docstrings))]
            start = int(numbers.integers(len(first) - 1))
            label = int(numbers.integers(2))
            other = docstrings[numbers.integers(len(docstrings))]
            second = first[start + 1] if label else other[0]
            samples.append(([[vocabulary[word] for word in s] for s in (first[start], second)], label))
        self.samples = samples[:TRAINING_PAIRS] if train else samples[TRAINING_PAIRS:]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (first, second), label = self.samples[index]
        half = LENGTH // 2 - 1
        tokens = [1, *first[:half], 2, *second[:half]]  # 1 begins the pair, 2 separates its sentences, 0 pads
        types = [int(place > len(first[:half]) + 1) for place in range(len(tokens))]
        rest = [0] * (LENGTH - len(tokens))
        return {
            "input_ids": torch.tensor(tokens + rest),
            "token_type_ids": torch.tensor(types + rest),
            "attention_mask": torch.tensor([1] * len(tokens) + rest),
            "labels": torch.tensor(label),
        }


def network() -> nn.Module:
    """Build the model from its config."""
    config = BertConfig(
        vocab_size=8192, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config).to(DTYPE)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the original's optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=LR)


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose prediction is their label."""
    return float((predictions == targets).mean())


def shuffled(data: Dataset) -> DataLoader:
    """Return a loader that shuffles with a generator of its own, seeded by SEED."""
    generator = torch.Generator().manual_seed(SEED)
    return DataLoader(data, shuffle=True, batch_size=GLOBAL_BATCH, generator=generator)


def loader_order(epoch: int) -> list[int]:
    """Return the order in which ``shuffled`` reads the samples in an epoch; Accelerate divides the same batches."""
    loader = shuffled(range(TRAINING_PAIRS))
    for _ in range(epoch):
        list(loader)
    return [int(index) for batch in loader for index in batch]


ORDER = None if "--own-order" in sys.argv else loader_order
"""None, mtrain's own order, with `--own-order`."""
