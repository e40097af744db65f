"""Trainings by torch whose twins ``paddle_zoo.py`` makes; a program: python torch_twin.py OUT NAME ..."""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mtrain_trace
from tests.trace import twins


class Named(nn.Module):
    """The same net whose parts have other names than in Paddle's twin."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.first, self.rest = net[0], net[1:]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(images))


def train(name: str) -> None:
    norm = [nn.BatchNorm1d(16)] if "norm" in name else []
    layers = [nn.Linear(*sizes) for sizes in twins.LAYERS]
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, twins.start(), strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
    net = nn.Sequential(layers[0], *norm, nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    model = Named(net) if "named" in name else net
    if "adam" in name:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    images, labels = twins.data()
    for update in range(twins.UPDATES):
        part = twins.chosen(update)
        optimizer.zero_grad()
        logits = model(torch.from_numpy(images[part]))
        nn.functional.cross_entropy(logits, torch.from_numpy(np.ascontiguousarray(labels[part]))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        if os.fork() == 0:
            recorder = mtrain_trace.attach(str(Path(sys.argv[1]) / name))
            train(name)
            recorder.close()
            os._exit(0)
        if os.wait()[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
