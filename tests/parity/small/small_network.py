"""The network of ``small_model``. Import it only where a framework is bound."""

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Tensor


class Network(nn.Module):
    """Two convolutions with BatchNorm, one for each rule of the running variance, and a linear head."""

    def __init__(self, class_count: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16, unbiased_variance=False)
        self.head = nn.Linear(16, class_count)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """``total``, the mean cross entropy over the micro batch, in training; ``probabilities`` (B, C) in evaluation.

        Args:
            batch: ``images`` uint8 (B, S, S, 3); in training ``labels`` int64 (B,).
        """
        x_BSS3 = ops.astype(batch["images"], ops.dtype(self.head.weight)) * (2 / 255) - 1
        x_BCSS = ops.permute_dims(x_BSS3, (0, 3, 1, 2))
        x_BCSS = ops.silu(self.bn1(self.conv1(x_BCSS)))
        x_BCSS = ops.silu(self.bn2(self.conv2(x_BCSS)))
        logits_BC = self.head(ops.mean(x_BCSS, axis=(2, 3)))
        if not self.training:
            return {"probabilities": ops.softmax(logits_BC, 1)}
        return {"total": ops.mean(ops.cross_entropy(logits_BC, batch["labels"]))}
