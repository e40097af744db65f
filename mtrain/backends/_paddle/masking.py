"""Masks of weights on Paddle tensors, which keep their memory."""

import paddle
from paddle import Tensor

from mtrain.core.masking import Masking
from mtrain.core.overriding import override


class PaddleMasking(Masking[Tensor]):
    """See ``core.masking.Masking``."""

    @override
    def _ones(self, tensor: Tensor) -> Tensor:
        return paddle.ones_like(tensor).detach()

    @override
    def _choose(self, mask: Tensor, weight: Tensor, share: float) -> None:
        sizes = weight.detach().abs()
        count = int(share * sizes.size)
        if count:
            smallest, _ = paddle.kthvalue(sizes.flatten(), count)
            paddle.assign((sizes > smallest).astype(mask.dtype), mask)

    @override
    def _multiply(self, tensor: Tensor, mask: Tensor) -> None:
        paddle.assign(tensor * mask, tensor)

    @override
    def _soften(self, tensor: Tensor, amount: float) -> None:
        # Paddle's `clip` holds its limits as float32.
        limit = paddle.to_tensor(amount, dtype=tensor.dtype)
        paddle.assign(tensor - paddle.maximum(paddle.minimum(tensor, limit), -limit), tensor)
