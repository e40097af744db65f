"""The vision transformer's network on the bound framework. Import it only where a framework is bound.

Architecture: Dosovitskiy et al. 2021 (arXiv 2010.11929), equations 1 to 4: patches embedded by one linear map, learned
positions, blocks that normalise first, GELU. Shape letters: B batch, S side of the image in pixels, P side of a patch
in pixels, G patches along a side, N patches (and the token), E numbers of a patch, D width, M heads, K width of a head,
C classes.
"""

from dataclasses import dataclass

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Tensor
from mtrain.models.common.imitation import Imitator, Signals
from mtrain.models.common.pixels import as_floats, wide

_EPS = 1e-6
"""Epsilon of the norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a network."""

    patch: int
    """Side of a patch in pixels."""
    patches: int
    """Number of patches of an image."""
    width: int
    depth: int
    """Number of blocks."""
    heads: int
    hidden: int
    """Hidden size of a block's perceptron."""
    class_count: int
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    dropout: float = 0.0
    """Probability of dropping an element."""


class BiasedQKV(nn.Module):
    """The linear map to queries, keys and values with a bias, of which the keys' part is not trained.

    The bias of the keys cancels in the softmax: its gradient is 0 but for rounding noise, which Adam would turn into
    steps that differ between frameworks. It is there because published weights have it.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.parameter((3 * width, width))
        self.bias = nn.parameter((3 * width,))

    def forward(self, x_BND: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, 3 * D)."""
        y_BNE = ops.matmul(x_BND, ops.permute_dims(self.weight, (1, 0)))
        queries_D, keys_D, values_D = ops.split(self.bias, [self.width] * 3, axis=0)
        # The gradient of the keys' bias is rounding noise, which Adam would turn into steps.
        bias_E = ops.concat((queries_D, ops.detach(keys_D), values_D))
        return y_BNE + ops.astype(bias_E, ops.dtype(y_BNE))


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = BiasedQKV(width) if qkv_bias else nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        batch, count, width = ops.shape(x_BND)
        split_BN3MK = ops.reshape(self.qkv(x_BND), (batch, count, 3, self.heads, width // self.heads))
        qkv_3BMNK = ops.permute_dims(split_BN3MK, (2, 0, 3, 1, 4))
        mixed_BMNK = ops.scaled_dot_product_attention(qkv_3BMNK[0], qkv_3BMNK[1], qkv_3BMNK[2])
        return self.out(ops.reshape(ops.permute_dims(mixed_BMNK, (0, 2, 1, 3)), (batch, count, width)))


class Perceptron(nn.Module):
    """Two linear maps with GELU between them."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(shape.width, shape.hidden)
        self.outer = nn.Linear(shape.hidden, shape.width)
        self.drop = nn.Dropout(shape.dropout, name=f"{name}.hidden")

    def forward(self, x_BND: Tensor, random_key: Tensor | None) -> Tensor:
        """Return a tensor of the same shape."""
        return self.outer(self.drop(ops.gelu(self.inner(x_BND)), random_key))


class Block(nn.Module):
    """A block: attention, then a perceptron, each with a norm before and a shortcut around it (equations 2 and 3).

    Elements are dropped after each linear map but that to queries, keys and values (appendix B.1).
    """

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=_EPS)
        self.attention = Attention(shape.width, shape.heads, qkv_bias=shape.qkv_bias)
        self.norm2 = nn.LayerNorm(shape.width, eps=_EPS)
        self.perceptron = Perceptron(shape, name)
        self.drop1 = nn.Dropout(shape.dropout, name=f"{name}.attention")
        self.drop2 = nn.Dropout(shape.dropout, name=f"{name}.perceptron")

    def forward(self, x_BND: Tensor, random_key: Tensor | None) -> Tensor:
        """Return a tensor of the same shape."""
        x_BND = x_BND + self.drop1(self.attention(self.norm1(x_BND)), random_key)
        return x_BND + self.drop2(self.perceptron(self.norm2(x_BND), random_key), random_key)


class Network(Imitator):
    """The classifier with its loss. It returns losses in training, ``probabilities`` (B, C) in evaluation.

    Args:
        shape: Sizes of the network.
        with_token: Classify an additional class token instead of the mean over the patches.
        label_smoothing: See ``ops.cross_entropy``.
    """

    positions: Tensor
    token: Tensor

    def __init__(self, shape: Shape, *, with_token: bool, label_smoothing: float) -> None:
        super().__init__()
        self.patch, self.with_token, self.label_smoothing = shape.patch, with_token, label_smoothing
        if with_token:
            self.token = nn.parameter((1, 1, shape.width))
        self.positions = nn.parameter((1, shape.patches + with_token, shape.width))
        self.embedding = nn.Linear(3 * shape.patch**2, shape.width)
        self.drop = nn.Dropout(shape.dropout, name="embedding")
        self.blocks = nn.ModuleList([Block(shape, f"blocks.{number}") for number in range(shape.depth)])
        self.norm = nn.LayerNorm(shape.width, eps=_EPS)
        self.head = nn.Linear(shape.width, shape.class_count)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``total``, the mean cross entropy of the micro batch, in training; ``probabilities`` in evaluation.

        Args:
            batch: ``images`` uint8 (B, S, S, 3) RGB; in training also ``labels`` int64 (B,), and for dropout
                ``random_key`` int32 (B,).
        """
        signals = self.signals(batch)
        logits_BC = signals.logits
        if not self.training:
            return {"probabilities": ops.softmax(logits_BC, 1)}
        losses_B = ops.cross_entropy(logits_BC, batch["labels"], label_smoothing=self.label_smoothing)
        return self.taught({"total": ops.mean(losses_B)}, batch, lambda: signals)

    def signals(self, batch: Batch) -> Signals:
        """Show the class logits."""
        return Signals(logits=self.logits(self.patches(batch["images"]), batch.get("random_key")))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, C) of the classes."""
        return {"logits": self.logits(self.patches(batch["images"]))}

    def patches(self, images_BSS3: Tensor) -> Tensor:
        """Cut images, uint8 (B, S, S, 3), into patches (B, N, 3 * P * P) in -1..1, in the dtype of the weights.

        Patches are ordered row by row, and so are the pixels within a patch.
        """
        dtype = ops.dtype(self.positions)
        x_BSS3 = as_floats(images_BSS3, dtype=dtype) * (2 / 255) - 1
        batch, height, width, channels = ops.shape(x_BSS3)
        side = self.patch
        rows, columns = height // side, width // side
        cut_BGPGP3 = ops.reshape(x_BSS3, (batch, rows, side, columns, side, channels))
        x_BGGPP3 = ops.permute_dims(cut_BGPGP3, (0, 1, 3, 2, 4, 5))
        x_BNE = ops.reshape(x_BGGPP3, (batch, rows * columns, side * side * channels))
        return ops.astype(x_BNE, dtype)

    def logits(self, patches_BNE: Tensor, random_key: Tensor | None = None) -> Tensor:
        """Compute the class logits (B, C), in float32 or float64, from patches."""
        x_BND = self.embedding(patches_BNE)
        if self.with_token:
            batch, _, width = ops.shape(x_BND)
            token_B1D = ops.broadcast_to(ops.astype(self.token, ops.dtype(x_BND)), (batch, 1, width))
            x_BND = ops.concat((token_B1D, x_BND), axis=1)
        x_BND = self.drop(x_BND + ops.astype(self.positions, ops.dtype(x_BND)), random_key)
        for block in self.blocks:
            x_BND = block(x_BND, random_key)
        x_BND = self.norm(x_BND)
        # The token was put before the patches.
        pooled_BD = x_BND[:, 0] if self.with_token else ops.mean(x_BND, axis=1)
        return wide(self.head(pooled_BD))
