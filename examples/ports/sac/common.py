"""Networks, game and memory of the soft actor-critic; shared by its scripts.

The game: bring a cart to the middle of a line and keep it there. The noise of the actor's actions is remembered with each step, so it
is the same on any number of ranks. With `--fp64`, plain.py computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

GLOBAL_BATCH, UPDATES, SEED = 24, 60, 19
STEPS = 4
"""Steps of the game before each update."""
DISCOUNT, FOLLOWS, WANTED_ENTROPY = 0.9, 0.05, -1.0
MEMORY = 400
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Actor(nn.Module):
    """Chooses a force from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))
        self.to(DTYPE)

    def forward(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return forces, and the logarithms of their probability densities."""
        mean, log_deviation = self.layers(states).chunk(2, dim=1)
        log_deviation = log_deviation.clamp(-4, 1)
        before = mean + log_deviation.exp() * noise
        density = -0.5 * noise.square() - log_deviation - 0.5 * math.log(2 * math.pi)
        squashed = 2 * (math.log(2) - before - functional.softplus(-2 * before))
        return before.tanh(), density - squashed


class Critic(nn.Module):
    """Says twice how much a force is worth in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
        self.other = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
        self.to(DTYPE)

    def forward(self, states: Tensor, forces: Tensor) -> tuple[Tensor, Tensor]:
        """Return both values."""
        pairs = torch.cat([states, forces], dim=1)
        return self.one(pairs), self.other(pairs)


class Temperature(nn.Module):
    """Says how much the entropy of the actor counts."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor([-1.0], dtype=DTYPE))

    def forward(self) -> Tensor:
        """Return it."""
        return self.logarithm.exp()


class Player:
    """Plays games, and remembers the last steps. All random numbers are its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(SEED)
        self.cart = self.random.uniform(-1, 1, 2)
        """Place and velocity."""
        self.memory = np.zeros((MEMORY, 8), np.float32)
        """Rows of a state, a force, a reward, the next state, and noise for the actions in both states."""
        self.steps = 0

    def play(self, actor: nn.Module) -> None:
        """Make some steps of the game, as the actor says."""
        weight = next(actor.parameters())
        for _ in range(STEPS):
            before = self.cart
            with torch.no_grad():
                state, noise = torch.tensor(before).to(weight), torch.tensor(self.random.normal(size=(1, 1))).to(weight)
                force = float(actor(state[None], noise)[0])
            place, speed = before
            speed = 0.9 * speed + 0.3 * force
            self.cart = np.array([place + 0.3 * speed, speed])
            reward = -(place**2) - 0.1 * speed**2 - 0.01 * force**2
            self.memory[self.steps % MEMORY] = [*before, force, reward, *self.cart, *self.random.normal(size=2)]
            self.steps += 1
            if self.steps % 20 == 0:
                self.cart = self.random.uniform(-1, 1, 2)

    def remember(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return states, forces, rewards, next states, and noise for both, of some steps."""
        rows = torch.tensor(self.memory[self.random.integers(min(self.steps, MEMORY), size=count)]).to(DTYPE)
        return rows[:, :2], rows[:, 2:3], rows[:, 3:4], rows[:, 4:6], rows[:, 6:7], rows[:, 7:]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on."""
        cart, memory = self.cart.copy(), self.memory.copy()
        return {"random": self.random.bit_generator.state, "cart": cart, "memory": memory, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned."""
        self.random.bit_generator.state = state["random"]
        self.cart, self.memory, self.steps = state["cart"], state["memory"], state["steps"]
