"""A small GPT-2 of the library transformers on characters of Python's own licence text; no weights are downloaded."""

import sys

import numpy as np
from transformers import GPT2Config, GPT2LMHeadModel

LETTERS = "".join(map(chr, range(32, 127)))


class Characters:
    """Pieces of a text as character numbers; the labels are the same numbers, which the model shifts itself."""

    def __init__(self, split: str = "train", length: int = 16) -> None:
        text = (sys.copyright + " ") * 8
        numbers = np.array([max(LETTERS.find(letter), 0) for letter in text], dtype=np.int64)
        pieces = np.lib.stride_tricks.sliding_window_view(numbers, length)[::7]
        self.pieces = pieces[: len(pieces) * 3 // 4] if split == "train" else pieces[len(pieces) * 3 // 4 :]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Gpt2(GPT2LMHeadModel):
    """GPT-2 that takes a batch as one argument and returns what transformers returns, with the loss in it."""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.0) -> None:
        config = GPT2Config(
            vocab_size=len(LETTERS), n_positions=32, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation="eager",
        )  # fmt: skip
        super().__init__(config)

    def forward(self, batch=None, **keywords):
        """Return the model's output; its ``loss`` is the mean over all characters."""
        return super().forward(**(keywords if batch is None else batch))

    def predict(self, batch):
        """Return the most likely next character of each position, and the true one."""
        logits = self.forward(input_ids=batch["input_ids"]).logits
        return logits[:, :-1].argmax(-1), batch["labels"][:, 1:]


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of right characters."""
    return float((predictions == targets).mean())
