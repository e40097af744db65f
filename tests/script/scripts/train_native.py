"""A network trained by an optimizer of torch or of the script, or one by each of several: with groups, a schedule and decay."""

import argparse
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import mtrain

SAMPLES, BATCH, SEED = 48, 12, 3
RATE = 0.02


class Points(torch.utils.data.Dataset):
    """Points in six dimensions, and whether they are far from the origin."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = np.random.default_rng(index).normal(size=6)
        return torch.from_numpy(point), torch.tensor(float((point**2).sum() > 6), dtype=torch.float64)


class Net(nn.Module):
    """Layers with arrays of one and two axes, whose lengths no number of ranks divides; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 7)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).squeeze(1)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: steps are signs of a mixture of mean and gradient."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_((0.9 * mean + 0.1 * parameter.grad).sign(), alpha=-group["lr"])
                    mean.mul_(0.99).add_(parameter.grad, alpha=0.01)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024 (arXiv 2405.15682), algorithm 1: trained at y, evaluated at the average x of z."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "k": 0, "trains": False})

    def eval(self) -> None:
        """Set the weights to x."""
        self._switch(False, lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        """Set the weights to y."""
        self._switch(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def _switch(self, trains: bool, share: Any) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], share(group["beta"]))
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for y in group["params"]:
                if y.grad is not None:
                    z = self.state[y].setdefault("z", y.clone())
                    gradient = y.grad + group["weight_decay"] * y
                    y.lerp_(z, 1 / group["k"])
                    y.sub_(gradient, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["k"])))
                    z.sub_(gradient, alpha=group["lr"])


OWN = {"Lion": Lion, "ScheduleFree": ScheduleFree}
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adam": {"amsgrad": True},
}
NO_DECAY = ("Rprop",)


def made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: matrices with decay, and the others with another learning rate."""
    parameters = [(x, x.dim() > 1) for x in model.parameters()]
    matrices, others = (
        [x for x, is_matrix in parameters if is_matrix],
        [x for x, is_matrix in parameters if not is_matrix],
    )
    kind = OWN.get(name) or getattr(torch.optim, name)
    if name == "Muon":  # for matrices alone
        for x in others:
            x.requires_grad = False
        return kind(matrices, lr=RATE, weight_decay=0.1)
    decay = {} if name in NO_DECAY else {"weight_decay": 0.1}
    groups = [{"params": matrices, **decay}, {"params": others, "lr": RATE / 2}]
    return kind(groups, lr=RATE, **SETTINGS.get(name, {}))


def rate(update: int) -> float:
    """Return the learning rate of an update."""
    return float(RATE / (1 + update % 4))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return functional.binary_cross_entropy_with_logits(model(x), y)


def plain(names: Sequence[str], updates: int) -> dict[str, Any]:
    """Train as a plain script does; return weights, and those to evaluate with, as a checkpoint of mtrain names them."""
    torch.manual_seed(SEED)
    models = {name: Net().double() for name in names}
    optimizers = {name: made(name, model) for name, model in models.items()}
    ratios = {name: [group["lr"] / RATE for group in optimizer.param_groups] for name, optimizer in optimizers.items()}
    for optimizer in optimizers.values():
        if hasattr(optimizer, "train"):
            optimizer.train()
    data = Points()
    for update in range(updates):
        first = update * BATCH % SAMPLES
        x, y = (torch.stack(part) for part in zip(*[data[i] for i in range(first, first + BATCH)], strict=True))
        for name, optimizer in optimizers.items():
            for group, ratio in zip(optimizer.param_groups, ratios[name], strict=True):
                group["lr"] = rate(update) * ratio
            optimizer.zero_grad()
            loss_of(models[name], x, y).backward()
            optimizer.step()
    prefix = {name: f"{name}/" if len(names) > 1 else "" for name in names}
    arrays = {
        f"{prefix[name]}{key}": x.numpy().copy() for name in names for key, x in models[name].state_dict().items()
    }
    for name, optimizer in optimizers.items():
        if hasattr(optimizer, "eval"):
            optimizer.eval()
            arrays |= {f"ema {prefix[name]}{key}": x.numpy().copy() for key, x in models[name].state_dict().items()}
    return arrays


def train(names: Sequence[str], updates: int, **settings: Any) -> None:
    """Train in a session: one model without a name, or one for each optimizer."""
    with mtrain.session() as session:
        models = {
            name: session.prepare(
                Net,
                optimizer=lambda model, name=name: made(name, model),
                schedule=rate,
                name=name if len(names) > 1 else None,
                **(settings if name == names[0] else {}),
            )
            for name in names
        }
        length = {"global_batch": BATCH, "updates": updates, "order": lambda epoch: range(SAMPLES)}
        for x, y in session.batches(Points(), **length):
            for model, optimizer in models.values():
                optimizer.update(loss_of(model, x, y))
            if session.progress.update == int(os.environ.get("KILLED_IN", -1)):
                os.kill(os.getpid(), signal.SIGKILL)
            if session.progress.update % 4 == 3:
                for model, _ in models.values():
                    session.evaluate(model, Points(), metric=lambda p, t: float(np.abs(p - t).mean()), batch_size=6)


def main() -> None:
    """Train with the optimizers that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizers", nargs="+")
    parser.add_argument("--updates", type=int, default=10)
    chosen = parser.parse_args()
    train(chosen.optimizers, chosen.updates, seed=SEED, precision="fp64")


if __name__ == "__main__":
    main()
