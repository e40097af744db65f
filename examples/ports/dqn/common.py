"""Network, game and memory of the deep Q-learning; shared by its scripts.

The game: keep a pole upright by pushing its foot to the left or to the right. With `--fp64`, plain.py computes in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GLOBAL_BATCH, UPDATES, SEED = 24, 90, 17
STEPS = 3
"""Steps of the game before each update."""
DISCOUNT, FOLLOWS = 0.95, 0.05
MEMORY = 400
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Pole:
    """A pole on a foot; the state is its angle, its angular velocity, and the velocity of the foot."""

    def __init__(self) -> None:
        self.state = np.zeros(3)

    def reset(self, random: np.random.Generator) -> None:
        """Begin a game."""
        self.state = random.uniform(-0.1, 0.1, 3)

    def step(self, action: int) -> tuple[float, bool]:
        """Push for a moment; return the reward, and whether the pole has fallen."""
        angle, turning, speed = self.state
        push = 2.0 * action - 1.0
        turning += 0.1 * (9.0 * np.sin(angle) - 4.0 * push * np.cos(angle) - 0.2 * turning)
        speed = 0.9 * speed + 0.1 * push
        angle += 0.1 * turning
        self.state = np.array([angle, turning, speed])
        fallen = bool(abs(angle) > 0.8)
        return (-1.0 if fallen else 0.1 - abs(angle)), fallen


class Player:
    """Plays games, and remembers the last steps. All random numbers are its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(SEED)
        self.game = Pole()
        self.game.reset(self.random)
        self.memory = np.zeros((MEMORY, 9), np.float32)
        """Rows of a state, an action, a reward, the next state, and whether the game goes on."""
        self.steps = 0

    def play(self, network: nn.Module) -> None:
        """Make some steps of the game, mostly as the network says."""
        for _ in range(STEPS):
            before = self.game.state
            if self.random.random() < max(0.1, 1 - self.steps / 150):
                action = int(self.random.integers(2))
            else:
                weight = next(network.parameters())
                with torch.no_grad():
                    action = int(network(torch.tensor(before).to(weight)[None]).argmax())
            reward, fallen = self.game.step(action)
            self.memory[self.steps % MEMORY] = [*before, action, reward, *self.game.state, not fallen]
            self.steps += 1
            if fallen:
                self.game.reset(self.random)

    def remember(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return states, actions, rewards, next states, and whether the game goes on, of some steps."""
        rows = torch.tensor(self.memory[self.random.integers(min(self.steps, MEMORY), size=count)]).to(DTYPE)
        return rows[:, :3], rows[:, 3:4].long(), rows[:, 4], rows[:, 5:8], rows[:, 8]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on."""
        game, memory = self.game.state.copy(), self.memory.copy()
        return {"random": self.random.bit_generator.state, "game": game, "memory": memory, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned."""
        self.random.bit_generator.state = state["random"]
        self.game.state, self.memory, self.steps = state["game"], state["memory"], state["steps"]


def network() -> nn.Module:
    """Build the network that says how much each action is worth."""
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2)).to(DTYPE)
