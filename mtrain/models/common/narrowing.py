"""Choose the rows of predictions that can become detections, on the device. Import it only where a framework is bound.

Shape letters: B batch, N rows of an image, K rows that are left.
"""

from collections.abc import Mapping

from mtrain.core import ops
from mtrain.core.interfaces import Tensor

_MARGIN = 0.999
"""Share of the threshold above which a row stays: a device may round a score differently from the host, which decides."""
_STEP = 64
"""The number of rows left is a multiple of this, so that shapes repeat."""


def narrow(output: Mapping[str, Tensor], score_BN: Tensor, *, above: float) -> dict[str, Tensor]:
    """Return the rows of each array of ``output``, (B, N, ...), whose best score is above a threshold, in their order.

    All images keep as many rows as the one with most; so rows with lower scores may stay, too, which the host drops. The
    number is the one metric that is read from the device.
    """
    rows = ops.shape(score_BN)[1]
    high_BN = score_BN > above * _MARGIN
    score_BN = ops.where(high_BN, score_BN, 0.0)  # nan would count as the largest
    most = int(ops.to_numpy(ops.max(ops.sum(high_BN, axis=1))))
    kept = min(max(-(-most // _STEP), 1) * _STEP, rows)
    _, best_BK = ops.topk(score_BN, kept, 1)
    in_order_BK = ops.take_along_axis(best_BK, ops.argsort(best_BK, axis=1), 1)
    return {name: _take(x, in_order_BK) for name, x in output.items()}


def _take(x: Tensor, rows_BK: Tensor) -> Tensor:
    batch, kept = ops.shape(rows_BK)
    columns = ops.shape(x)[2]
    return ops.take_along_axis(x, ops.broadcast_to(rows_BK[:, :, None], (batch, kept, columns)), 1)
