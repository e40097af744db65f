"""Weights, inputs and stored metrics of residual networks, and the plain torch network that the metrics come from.

``python -m tests.models.resnet_golden`` computes ``tests/data/golden_resnet.json`` anew, with ``torch.nn`` alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[1] / "data" / "golden_resnet.json"
VARIANTS = {"18": ((2, 2, 2, 2), False), "34": ((3, 4, 6, 3), False), "50": ((3, 4, 6, 3), True)}
CLASSES, SIDE, IMAGES = 10, 64, 2
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value of an entry: float64, a function of name and shape alone."""
    rng = np.random.default_rng([3, *name.encode()])
    leaf = name.rpartition(".")[2]
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if len(shape) == 4:
        return rng.normal(0, np.sqrt(2 / (shape[0] * shape[2] * shape[3])), shape)
    if name.startswith("fc."):
        return rng.normal(0, 0.1, shape)
    return rng.uniform(0.5, 1.5, shape) if leaf in ("weight", "running_var") else rng.normal(0, 0.1, shape)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=np.uint8)
    return {"images": images, "labels": np.array([3, 7])}


def metrics(
    logits: np.ndarray, total: float, gradients: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Logits in evaluation, the loss in training, and of each gradient its norm and its product with a fixed array;
    the same of the running statistics after the step in training."""

    def parts(name: str, values: np.ndarray) -> list[float]:
        direction = np.random.default_rng([5, *name.encode()]).normal(size=values.shape)
        return [float(np.sqrt((values**2).sum())), float((values * direction).sum())]

    return {
        "logits": logits.tolist(),
        "total": total,
        "gradients": {name: parts(name, values) for name, values in gradients.items()},
        "statistics": {name: parts(name, values) for name, values in state.items() if "running" in name},
    }


def plain(variant: str) -> Any:
    """The network of plain ``torch.nn`` layers under torchvision's names."""
    from torch import nn

    counts, is_deep = VARIANTS[variant]

    class Block(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            out = 4 * width if is_deep else width
            kernels = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            for i, (a, b, kernel, step) in enumerate(
                kernels if is_deep else [(channels, width, 3, stride), (width, width, 3, 1)]
            ):
                setattr(self, f"conv{i + 1}", nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False))
                setattr(self, f"bn{i + 1}", nn.BatchNorm2d(b))
            self.last = 3 if is_deep else 2
            self.relu = nn.ReLU()
            self.downsample = None
            if stride != 1 or channels != out:
                self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

        def forward(self, x: Any) -> Any:
            y = x
            for i in range(1, self.last + 1):
                y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
                y = y if i == self.last else self.relu(y)
            return self.relu(y + (x if self.downsample is None else self.downsample(x)))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            channels = 64
            for stage, count in enumerate(counts):
                blocks = []
                for i in range(count):
                    blocks.append(Block(channels, 64 * 2**stage, 2 if stage and i == 0 else 1))
                    channels = 64 * 2**stage * (4 if is_deep else 1)
                setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, CLASSES)

        def forward(self, x: Any) -> Any:
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
                x = stage(x)
            return self.fc(self.avgpool(x).flatten(1))

    return Plain()


def computed(variant: str) -> dict[str, Any]:
    """The metrics of the plain network."""
    import torch

    torch.set_num_threads(1)
    network = plain(variant).double()
    state = network.state_dict()
    network.load_state_dict({name: torch.from_numpy(fill(name, tuple(x.shape))) for name, x in state.items()})
    given = batch()
    pixels = torch.from_numpy(((given["images"] / 255 - MEAN) / STD).transpose(0, 3, 1, 2).copy())
    network.eval()
    with torch.no_grad():
        logits = network(pixels).numpy()
    network.train()
    total = torch.nn.functional.cross_entropy(network(pixels), torch.from_numpy(given["labels"]))
    total.backward()
    gradients = {name: p.grad.numpy() for name, p in network.named_parameters()}
    after = {name: x.numpy() for name, x in network.state_dict().items()}
    return metrics(logits, total.item(), gradients, after)


if __name__ == "__main__":
    FILE.write_text(json.dumps({variant: computed(variant) for variant in VARIANTS}, indent=0) + "\n")
