"""Exponential moving average of weights and float buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Average:
    """Shadow of the tensors ``live`` under ``names``; they trade places for evaluation, nothing is copied."""

    def __init__(
        self, names: Sequence[str], live: Sequence[Tensor], shares: Callable[[int], tuple[float, float]]
    ) -> None:
        """``shares``: (keep, take) behind an update, see ``core.recipe.ema_shares``."""
        self.names = names
        self.live = live
        self.shadow = [tensor.detach().clone() for tensor in live]
        self._shares = shares

    def follow(self, update: int) -> None:
        """shadow = keep * shadow + take * live, behind update ``update`` (1-based)."""
        keep, take = self._shares(update)
        live = [x.detach() for x in self.live]
        if take == 1 - keep:
            torch._foreach_lerp_(self.shadow, live, take)
        else:
            torch._foreach_mul_(self.shadow, keep)
            torch._foreach_add_(self.shadow, live, alpha=take)

    def restart(self) -> None:
        """shadow = live."""
        torch._foreach_copy_(self.shadow, [x.detach() for x in self.live])

    def swap(self) -> None:
        """Trade the contents of shadow and live: by pointer."""
        for i, tensor in enumerate(self.live):
            inside = tensor.data
            tensor.data = self.shadow[i]
            self.shadow[i] = inside
