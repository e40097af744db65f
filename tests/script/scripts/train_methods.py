"""A training script that uses methods and attributes of its model: a recurrent net with a carried state, values and texts."""

import argparse
import json
import sys
from pathlib import Path

import torch
from points import Plain
from torch import Tensor, nn
from torch.nn import functional as F

import mtrain

BATCH, UPDATES = 12, 10


class Net(nn.Module):
    hidden_size = 6

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.cell = nn.GRUCell(6, 6)
        self.policy = nn.Linear(6, 2)
        self.value = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.ones(6))

    def init_hidden(self, rows: int) -> Tensor:
        return next(self.parameters()).new_zeros(rows, self.hidden_size)

    def features(self, inputs: Tensor) -> Tensor:
        return self.cell(self.encoder(inputs), self.init_hidden(len(inputs))) * self.scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.policy(self.features(inputs))

    def get_value(self, inputs: Tensor) -> Tensor:
        return self.value(self.features(inputs)).sum(1)

    def norm_of(self) -> Tensor:
        """Use weights of parts directly, and not through their modules."""
        return self.scale.square().sum() + self.encoder.weight.square().sum()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def generate(self, inputs: Tensor, steps: int = 3) -> list[list[int]]:
        rows = []
        for _ in range(steps):
            chosen = self(inputs).argmax(1)
            inputs = inputs * 0.5 + chosen[:, None]
            rows.append(chosen.tolist())
        return rows


def loss_of(mode: str, model: Net, inputs: Tensor, targets: Tensor) -> Tensor:
    if mode == "method":
        return model.loss(inputs, targets)
    if mode == "value":  # a method alone, and another part of the weights in each update
        return (model.get_value(inputs) - targets).square().mean()
    # both: the model and two of its methods in one loss
    values = model.get_value(inputs)
    return F.cross_entropy(model(inputs), targets) + 0.5 * (values - targets).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["method", "value", "both", "direct"])
    parser.add_argument("--accumulate", type=int, default=1)
    flags = parser.parse_args()
    texts = []
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            Net, optimizer=mtrain.AdamW(learning_rate=1e-2), precision="fp64", accumulate=flags.accumulate
        )
        assert isinstance(model, Net)
        assert hasattr(model, "generate")
        assert not hasattr(model, "nothing")
        assert set(model.state_dict()) == set(Net().state_dict())
        assert model.init_hidden(3).shape == (3, 6)
        for inputs, targets in session.batches(Plain(120, 0), global_batch=BATCH, updates=UPDATES):
            loss = loss_of(flags.mode, model, inputs, targets)
            optimizer.update(loss + 0.01 * model.norm_of() if flags.mode == "direct" else loss)
            texts.append(model.generate(torch.arange(24, dtype=torch.float64).reshape(3, 8) / 24))
        if session.rank == 0:
            Path("texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    sys.exit(main())
