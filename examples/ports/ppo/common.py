"""Network, games and loss of proximal policy optimisation (PPO); shared by its scripts.

The game: stand in the middle of a line that the wind blows along. With `--fp64`, plain.py computes in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

ITERATIONS, EPOCHS, GAMES, STEPS, MINIBATCH, SEED = 5, 3, 6, 16, 24, 37
ROWS = GAMES * STEPS
UPDATES = ITERATIONS * EPOCHS * (ROWS // MINIBATCH)
LEARNING_RATE, CLIP_NORM, CLIP, DISCOUNT, SMOOTHING = 5e-3, 0.5, 0.2, 0.95, 0.9
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32
Rollout = dict[str, Tensor]


class Agent(nn.Module):
    """Says how likely each action is, and what a state is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)
        self.to(DTYPE)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the actions, (rows, 3), and worths, (rows,)."""
        hidden = self.body(states)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Games:
    """Games that are played side by side; their state is the place and the wind. All random numbers are its own."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(SEED)
        self.states = torch.rand(GAMES, 2, generator=self.random, dtype=torch.float64) - 0.5

    def step(self, actions: Tensor) -> Tensor:
        """Go to the left, stay, or go to the right; return the rewards."""
        place, wind = self.states.unbind(1)
        place = (place + 0.2 * (actions - 1) + 0.1 * wind).clamp(-2, 2)
        wind = 0.9 * wind + 0.3 * torch.randn(GAMES, generator=self.random, dtype=torch.float64)
        self.states = torch.stack([place, wind], 1)
        return 1 - place.abs()

    def permutation(self) -> Tensor:
        """Return the rows of a rollout in a random order."""
        return torch.randperm(ROWS, generator=self.random)

    def state_dict(self) -> dict[str, object]:
        """Return everything that the next steps depend on."""
        return {"random": self.random, "states": self.states}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from what ``state_dict`` has returned."""
        self.random, self.states = state["random"], state["states"]


def play(agent: nn.Module, games: Games) -> Rollout:
    """Play some steps of all games; return what the loss needs of each step, in rows."""
    steps: dict[str, list[Tensor]] = {"states": [], "actions": [], "logs": [], "worths": [], "rewards": []}
    with torch.no_grad():
        for _ in range(STEPS):
            states = games.states.to(next(agent.parameters()))
            logits, worths = agent(states)
            choice = Categorical(logits=logits)
            draws = torch.rand(GAMES, 1, generator=games.random, dtype=torch.float64)
            actions = (choice.probs.double().cumsum(1) < draws).sum(1).clamp(max=2)
            rewards = games.step(actions).to(states)
            for name, x in zip(steps, (states, actions, choice.log_prob(actions), worths, rewards), strict=True):
                steps[name].append(x)
        after = agent(games.states.to(states))[1]
    rows = {name: torch.stack(values) for name, values in steps.items()}
    gains = torch.zeros_like(rows["worths"])
    gain = torch.zeros_like(after)
    for step in reversed(range(STEPS)):
        surprise = rows["rewards"][step] + DISCOUNT * after - rows["worths"][step]
        gains[step] = gain = surprise + DISCOUNT * SMOOTHING * gain
        after = rows["worths"][step]
    rows["gains"], rows["returns"] = gains, gains + rows["worths"]
    return {name: x.flatten(0, 1) for name, x in rows.items()}


def loss_of(agent: nn.Module, rows: Rollout) -> Tensor:
    """Return the loss of PPO with clipped ratios, with the worths and the entropy."""
    logits, worths = agent(rows["states"])
    choice = Categorical(logits=logits)
    ratio = (choice.log_prob(rows["actions"]) - rows["logs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.min(ratio * rows["gains"], clipped * rows["gains"]).mean()
    return policy + 0.5 * (worths - rows["returns"]).square().mean() - 0.01 * choice.entropy().mean()
