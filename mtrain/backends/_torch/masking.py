"""Masks of weights on torch tensors."""

import torch
from torch import Tensor

from mtrain.core.masking import Masking
from mtrain.core.overriding import override


class TorchMasking(Masking[Tensor]):
    """See ``core.masking.Masking``."""

    @override
    def _ones(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, requires_grad=False)

    @override
    def _choose(self, mask: Tensor, weight: Tensor, share: float) -> None:
        sizes = weight.detach().abs()
        count = int(share * sizes.numel())
        if count:
            mask.copy_(sizes > sizes.flatten().kthvalue(count).values)

    @override
    def _multiply(self, tensor: Tensor, mask: Tensor) -> None:
        tensor.mul_(mask)

    @override
    def _soften(self, tensor: Tensor, amount: float) -> None:
        tensor.sub_(tensor.clamp(-amount, amount))
