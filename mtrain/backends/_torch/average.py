"""Exponential moving average of weights and float buffers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Average:
    """Shadow of the tensors ``live`` under ``names``; they trade places for evaluation, nothing is copied."""

    def __init__(self, names: Sequence[str], live: Sequence[Tensor], *, decay: float, ramp: float) -> None:
        self.names = names
        self.live = live
        self.shadow = [tensor.detach().clone() for tensor in live]
        self._decay = decay
        self._ramp = ramp

    def decay_at(self, update: int) -> float:
        """Decay after update ``update`` (1-based): it rises with the ramp."""
        return self._decay * (1 - math.exp(-update / self._ramp)) if self._ramp > 0 else self._decay

    def follow(self, update: int) -> None:
        """shadow = d * shadow + (1 - d) * live, behind update ``update``."""
        torch._foreach_lerp_(self.shadow, [x.detach() for x in self.live], 1 - self.decay_at(update))

    def restart(self) -> None:
        """shadow = live."""
        torch._foreach_copy_(self.shadow, [x.detach() for x in self.live])

    def swap(self) -> None:
        """Trade the contents of shadow and live: by pointer."""
        for i, tensor in enumerate(self.live):
            inside = tensor.data
            tensor.data = self.shadow[i]
            self.shadow[i] = inside
