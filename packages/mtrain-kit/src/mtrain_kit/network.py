"""The networks of the conformance kit. Import it only where a framework is bound, as ``mtrain_kit.convnet.build``
does."""

from collections.abc import Mapping
from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Imitation, Tensor


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm and one linear head; returns losses in training and logits in evaluation.

    With an ``imitation`` the square of the difference from the teacher's logits is added to ``total``.
    """

    imitation: Imitation | None = None

    def __init__(self, classes: int, drop: Any = None) -> None:
        """``drop``: a native dropout layer before the head; None: no dropout."""
        super().__init__()
        self.conv1: Any = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6, momentum=0.03)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8, momentum=0.03, unbiased_variance=False)
        self.drop = nn.Identity() if drop is None else drop
        self.head: Any = nn.Linear(8, classes)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map ``images`` (B, 3, H, W) and ``labels`` (B) to ``total`` and ``entropy``, or to ``logits`` (B,
        classes)."""
        logits = self.signals(batch)
        if not self.training:
            return {"logits": logits}
        logits = ops.astype(logits, ops.dtype(self.head.weight))
        entropy = ops.mean(ops.cross_entropy(logits, batch["labels"]))
        losses = {"total": 5 * entropy, "entropy": ops.detach(entropy)}
        if self.imitation is None:
            return losses
        with nn.no_grad():
            wanted = self.imitation.seen(batch)
        apart = ops.mean(ops.square(logits - ops.astype(wanted, ops.dtype(logits))))
        return {**losses, "total": losses["total"] + apart, "distil": ops.detach(apart)}

    def signals(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Map ``images`` (B, 3, H, W) to logits (B, classes)."""
        x = ops.astype(batch["images"], ops.dtype(self.conv1.weight))
        x = ops.silu(self.bn1(self.conv1(x)))
        x = ops.silu(self.bn2(self.conv2(x)))
        return self.head(self.drop(ops.mean(x, axis=(2, 3))))


class Stem(nn.Module):
    """One convolution with BatchNorm at the full size of the images, and a value for each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv: Any = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.head: Any = nn.Conv2d(width, 1, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map ``images`` (B, 3, H, W) to ``total``, the mean square of the values."""
        x = ops.astype(batch["images"], ops.dtype(self.conv.weight))
        return {"total": ops.mean(ops.square(self.head(ops.silu(self.bn(self.conv(x))))))}


class Wide(nn.Module):
    """Two linear layers whose gradients outweigh all other bytes that ranks exchange."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.hidden: Any = nn.Linear(inputs, width)
        self.out: Any = nn.Linear(width, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map ``images`` (B, inputs) to ``total``."""
        x = ops.astype(batch["images"], ops.dtype(self.hidden.weight))
        return {"total": ops.mean(ops.square(self.out(ops.silu(self.hidden(x)))))}
