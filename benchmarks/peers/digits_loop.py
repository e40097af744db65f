"""Train a classifier on scikit-learn's digits with a plain loop of torch, for ``benchmarks/accuracy.py``.

    python benchmarks/peers/digits_loop.py resnet18|vit OUT.pt --seed 0 --epochs 15 --batch 64 --rate 0.002 --decay 0.05

The loop is what one writes without mtrain: a ``DataLoader``, torchvision's transforms on Pillow's images, torch's own AdamW,
``LambdaLR``, ``clip_grad_norm_`` and ``AveragedModel``. ResNet-18 is torchvision's; the vision transformer is made of
torch's ``TransformerEncoderLayer``, in the sizes of ``vit_digits``. Each network starts as its library starts it. The
settings are those of ``benchmarks/pairs/vit_digits.yml`` and ``resnet18_digits.yml``. OUT receives the averaged weights, under the names
that mtrain's networks have, so that one judge scores both sides.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from yolov5_train import named_operator

_OPERATORS = named_operator()  # kept for the life of the process

from torchvision import models, transforms  # noqa: E402 - importable only now

PATCH, WIDTH, DEPTH, HEADS = 2, 64, 4, 4
EVERY = 5
"""Each fifth image, from the first on, is for evaluation."""
SMOOTHING, CLIP, AVERAGE, RAMP = 0.1, 1.0, 0.99, 100


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The images for training, transformed."""

    def __init__(self, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        data = load_digits()
        chosen = np.arange(len(data.target)) % EVERY != 0
        pixels = np.rint(data.images[chosen] * (255 / 16)).astype(np.uint8)
        self._images = [Image.fromarray(np.repeat(one[..., None], 3, axis=2)) for one in pixels]
        self._labels = data.target[chosen]
        bilinear = transforms.InterpolationMode.BILINEAR
        self._transform = transforms.Compose(
            [
                transforms.Resize((side, side), bilinear),
                transforms.RandomAffine(8.0, translate=(0.06, 0.06), scale=(0.92, 1.08), interpolation=bilinear),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            ]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images[index]), int(self._labels[index])


class Transformer(nn.Module):
    """A vision transformer of torch's own layers, with the mean over patches."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (side // PATCH) ** 2, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH, 1e-6), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)
        for parameter in self.encoder.layers.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)  # the layers are copies of one another, with the same start values

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, 10)."""
        patches = self.embedding(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.encoder(patches + self.positions).mean(1))
        return logits


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the transformer's arrays under the names of mtrain's ``vit`` with ``qkv_bias``."""
    words = {
        "encoder.layers.": "blocks.",
        "encoder.norm.": "norm.",
        "self_attn.in_proj_": "attention.qkv.",
        "self_attn.out_proj": "attention.out",
        "linear1": "perceptron.inner",
        "linear2": "perceptron.outer",
    }
    found = {}
    for name, value in state.items():
        for old, new in words.items():
            name = name.replace(old, new)
        # mtrain's patches have their pixels row by row, each with its three colours.
        found[name] = value.permute(0, 2, 3, 1).flatten(1) if name == "embedding.weight" else value
    return found


def main() -> None:
    """Train, and write the averaged weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=["resnet18", "vit"])
    parser.add_argument("out", type=Path)
    for name, kind in (("seed", int), ("epochs", int), ("batch", int), ("rate", float), ("decay", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    network, data = made(arguments.network)
    averaged = trained(network, data, arguments)
    state = {name: value for name, value in averaged.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(renamed(state) if arguments.network == "vit" else state, arguments.out)


def made(name: str) -> tuple[nn.Module, Digits]:
    """Return a network and the images that it is trained on."""
    if name == "vit":
        return Transformer(8), Digits(8, (0.5,) * 3, (0.5,) * 3)
    return models.resnet18(num_classes=10), Digits(16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def trained(network: nn.Module, data: Digits, arguments: argparse.Namespace) -> nn.Module:
    """Train, and return the average of the network over the updates."""
    loader: Any = torch.utils.data.DataLoader(data, arguments.batch, shuffle=True, drop_last=True)
    matrices = [p for p in network.parameters() if p.dim() > 1 and p is not getattr(network, "positions", None)]
    others = [p for p in network.parameters() if not any(p is one for one in matrices)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.rate, weight_decay=arguments.decay)
    total, warmup = arguments.epochs * len(loader), len(loader)

    def factor(update: int) -> float:
        curve = (1 + math.cos(math.pi * update / total)) / 2
        return min(update / warmup, 1.0) * curve

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    average = torch.optim.swa_utils.AveragedModel(network, avg_fn=averaging, use_buffers=True)
    loss_of = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    for _ in range(arguments.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(network(images), labels).backward()
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            average.update_parameters(network)
    averaged: nn.Module = average.module
    return averaged


def averaging(average: Tensor, value: Tensor, count: Tensor | int) -> Tensor:
    """Return the new average after ``count`` updates: it forgets slowly once the training is under way."""
    if not average.is_floating_point():
        return value
    decay = AVERAGE * (1 - math.exp(-float(count) / RAMP))
    return decay * average + (1 - decay) * value


if __name__ == "__main__":
    main()
