"""The network on mtrain's neutral layers: the same code for torch and Paddle. `IntegralPose.build` imports it.

Shape letters: B batch, S side of the input in pixels, C channels, K points, H and W height and width of a map.
"""

from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Collective, Tensor


class Stage(nn.Module):
    """Two convolutions, of which the first one halves the sides."""

    def __init__(self, fine: int, coarse: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(fine, coarse, 3, 2, 1, bias=False), nn.BatchNorm2d(coarse)
        self.conv2, self.norm2 = nn.Conv2d(coarse, coarse, 3, 1, 1, bias=False), nn.BatchNorm2d(coarse)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, fine, H, W) to (B, coarse, H / 2, W / 2)."""
        return ops.relu(self.norm2(self.conv2(ops.relu(self.norm1(self.conv1(x_BCHW))))))


class Rise(nn.Module):
    """A transposed convolution that doubles the sides."""

    def __init__(self, coarse: int, fine: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(coarse, fine, 4, 2, 1, bias=False), nn.BatchNorm2d(fine)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, coarse, H, W) to (B, fine, 2 H, 2 W)."""
        return ops.relu(self.norm(self.conv(x_BCHW)))


class Network(nn.Module):
    """Losses in training mode, `points` (B, K, 3) in evaluation: x and y in sides of the input, and the certainty."""

    heads: Any

    def __init__(self, *, width: int, points: int, collective: Collective) -> None:
        super().__init__()
        self.collective = collective
        self.down = nn.Sequential(Stage(3, width), Stage(width, 2 * width), Stage(2 * width, 4 * width))
        self.up = nn.Sequential(Rise(4 * width, 2 * width), Rise(2 * width, width))
        self.heads = nn.Conv2d(width, points, 1)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Return `total` in training, which needs `points` and `known`; `points` in evaluation."""
        dtype = ops.dtype(self.heads.weight)
        images_BCHW = ops.permute_dims(ops.astype(batch["images"], dtype) / 127.5 - 1.0, (0, 3, 1, 2))
        points_BK2, certainty_BK1 = self.read(self.heads(self.up(self.down(images_BCHW))))
        if not self.training:
            return {"points": ops.concat([points_BK2, certainty_BK1], axis=2)}
        known_BK = ops.astype(batch["known"], ops.dtype(points_BK2))
        off_BK = ops.sum(ops.abs(points_BK2 - ops.astype(batch["points"], ops.dtype(points_BK2))), axis=2)
        # The mean over ranks, which every backend takes, is then the mean over the known points of all ranks.
        known = self.collective.all_reduce(ops.sum(known_BK), "mean")
        return {"total": ops.sum(off_BK * known_BK) / ops.clip(known, min=1.0)}

    def read(self, heat_BKHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean place of each heatmap (B, K, 2), in sides of the input, and its certainty (B, K, 1).

        The certainty is 1 where all heat is in one pixel, and 0 where it is spread evenly.
        """
        if ops.dtype(heat_BKHW) != "float64":
            heat_BKHW = ops.astype(heat_BKHW, "float32")
        batch, points, height, width = ops.shape(heat_BKHW)
        flat_BKN = ops.softmax(ops.reshape(heat_BKHW, (batch, points, height * width)), axis=2)
        share_BKHW = ops.reshape(flat_BKN, (batch, points, height, width))
        x_BK, spread_x_BK = _moments(ops.sum(share_BKHW, axis=2))
        y_BK, spread_y_BK = _moments(ops.sum(share_BKHW, axis=3))
        # An even spread has the variance 1/12 in each direction.
        certainty_BK = ops.clip(1.0 - ops.sqrt(ops.clip(6.0 * (spread_x_BK + spread_y_BK), min=0.0)), min=0.0)
        return ops.stack([x_BK, y_BK], axis=2), ops.expand_dims(certainty_BK, 2)


def _moments(share_BKN: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the place along an axis of length 1, each (B, K)."""
    dtype, count = ops.dtype(share_BKN), ops.shape(share_BKN)[2]
    place_N = (ops.astype(ops.arange(0, count, like=share_BKN, dtype="int64"), dtype) + 0.5) / count
    mean_BK = ops.sum(share_BKN * place_N, axis=2)
    return mean_BK, ops.sum(share_BKN * ops.square(place_N), axis=2) - ops.square(mean_BK)
