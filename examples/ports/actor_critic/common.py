"""Network and games of the actor-critic; shared by its scripts.

The game: catch a ball that falls down a board, by moving left, right, or not at all. A game depends on its number and the actions alone.
With `--fp64`, plain.py computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 12, 3, 23
GAMES = 180
LENGTH, WIDTH = 8, 6
DISCOUNT = 0.97
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Numbers(Dataset):
    """Numbers of games; those of the next epoch are others."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Play other games in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return GAMES

    def __getitem__(self, index: int) -> int:
        return self.epoch * GAMES + index


class ActorCritic(nn.Module):
    """Chooses a move, and says how much a state is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(3, 32), nn.Tanh())
        self.move, self.worth = nn.Linear(32, 3), nn.Linear(32, 1)
        self.to(DTYPE)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the moves, and the worth of the states."""
        shared = self.shared(states)
        return self.move(shared), self.worth(shared).squeeze(-1)


def play(model: nn.Module, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Play games; return the logarithms of the moves' probabilities, the worth of the states, and the returns, (game, step)."""
    weight = next(model.parameters())
    randoms = [np.random.default_rng(int(number)) for number in numbers]
    ball = np.array([random.integers(WIDTH) for random in randoms])
    drifts = np.array([random.integers(-1, 2, LENGTH) for random in randoms])
    chances = np.array([random.random(LENGTH) for random in randoms])
    catcher = np.full(len(ball), WIDTH // 2)
    logarithms, worths = [], []
    for step in range(LENGTH):
        state = np.stack([ball / WIDTH, catcher / WIDTH, np.full(len(ball), step / LENGTH)], axis=1)
        logits, worth = model(torch.tensor(state.astype(np.float32)).to(weight))
        probabilities = logits.detach().softmax(1).cumsum(1).cpu().numpy()
        moves = (chances[:, step, None] > probabilities[:, :2]).sum(1)
        logarithms.append(logits.log_softmax(1)[range(len(moves)), moves])
        worths.append(worth)
        ball = np.clip(ball + drifts[:, step], 0, WIDTH - 1)
        catcher = np.clip(catcher + moves - 1, 0, WIDTH - 1)
    caught = torch.tensor((ball == catcher).astype(np.float32)).to(weight)
    returns = caught[:, None] * DISCOUNT ** torch.arange(LENGTH - 1, -1, -1).to(weight)
    return torch.stack(logarithms, 1), torch.stack(worths, 1), returns


def loss_of(logarithms: Tensor, worths: Tensor, returns: Tensor) -> Tensor:
    """Return the loss of actor and critic."""
    advantages = returns - worths
    return (-logarithms * advantages.detach() + 0.5 * advantages.square()).mean()
