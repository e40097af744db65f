"""Texts and network of the word language model; shared by its scripts.

An LSTM reads long texts piece by piece: row r of a batch goes on where row r of the batch before has ended, and so does the hidden
state. With `--fp64`, plain.py computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROWS, PIECE, EPOCHS, SEED = 12, 7, 4, 31
WORDS, WIDTH, LAYERS = 30, 24, 2
LEARNING_RATE, CLIP = 20.0, 0.25
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32
Hidden = tuple[Tensor, Tensor] | None


def text(length: int, seed: int) -> Tensor:
    """Make a text: (ROWS, length) numbers of words, each of which mostly decides which word comes next."""
    random = np.random.default_rng(seed)
    words = [random.integers(WORDS, size=ROWS)]
    while len(words) < length:
        chosen = random.integers(WORDS, size=ROWS)
        words.append(np.where(random.random(ROWS) < 0.7, (7 * words[-1] + 3) % WORDS, chosen))
    return torch.from_numpy(np.stack(words, axis=1))


TRAIN, VAL = text(100, 1), text(40, 2)


class Pieces(torch.utils.data.Dataset):
    """The pieces of a text, each with the words that come next: piece after piece, and in each the rows."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return ROWS * ((self.text.shape[1] - 1) // self.length)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start, row = number // ROWS * self.length, number % ROWS
        piece = self.text[row, start : start + self.length + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    """An embedding, an LSTM, and the embedding again as the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.to(DTYPE)

    def forward(self, words: Tensor, hidden: Hidden = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the scores of the next words, and the hidden state after them; None is the one before a text."""
        output, hidden = self.lstm(self.embedding(words), hidden)
        return self.decoder(output).transpose(1, 2), hidden

    def predict(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the error of each row, and the words."""
        words, targets = batch
        return cross_entropy(self(words)[0], targets, reduction="none").mean(1), targets


def detached(hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cut the hidden state off from how it was computed."""
    return hidden[0].detach(), hidden[1].detach()
