"""The classifier of nets.py as a Paddle model: plain Paddle, without mtrain."""

import paddle
from paddle import nn
from paddle.nn import functional


class MyNet(nn.Layer):
    """Two layers."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, batch: tuple[paddle.Tensor, paddle.Tensor]) -> paddle.Tensor:
        """Return the loss of a batch, as the mean over its samples."""
        inputs, targets = batch
        return functional.cross_entropy(self.layers(inputs), targets)

    def predict(self, batch: tuple[paddle.Tensor, paddle.Tensor]) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return predictions and targets of a batch, for the metrics."""
        inputs, targets = batch
        return self.layers(inputs).argmax(1), targets
