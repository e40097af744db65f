"""Exponential moving average of weights and float buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.backends._torch import internals


class Average:
    """Moving average ("shadow") of the tensors ``live``; for evaluation the two swap storage without copying."""

    def __init__(
        self, names: Sequence[str], live: Sequence[Tensor], shares: Callable[[int], tuple[float, float]]
    ) -> None:
        """Start the average at the current values of ``live``.

        Args:
            names: Names of the tensors in ``live``, in the same order.
            live: The model's own tensors; they keep changing as it trains.
            shares: Maps the number of an update to (keep, take), see ``core.recipe.ema_shares``.
        """
        self.names = names
        self.live = live
        self.shadow = [tensor.detach().clone() for tensor in live]
        self._shares = shares
        self._remembered: dict[int, Tensor] = {}
        self._copies: list[Tensor] = []

    def remember(self) -> None:
        """Copy the buffers, which forward passes change before ``follow`` is called for the update just made."""
        places = [i for i, tensor in enumerate(self.live) if not tensor.requires_grad]
        if not self._copies:
            self._copies = [torch.empty_like(self.live[i]) for i in places]
        if places:
            internals.copy_(self._copies, [self.live[i].detach() for i in places])
        self._remembered = dict(zip(places, self._copies, strict=True))

    def follow(self, update: int) -> None:
        """Fold the weights of update ``update`` (1-based) in: shadow = keep * shadow + take * live."""
        keep, take = self._shares(update)
        live = [self._remembered.get(i, x.detach()) for i, x in enumerate(self.live)]
        self._remembered = {}
        if take == 1 - keep:
            internals.mix_(self.shadow, live, take)
        else:
            internals.scale_(self.shadow, keep)
            internals.add_scaled_(self.shadow, live, take)

    def restart(self) -> None:
        """Set the average to the current weights: shadow = live."""
        internals.copy_(self.shadow, [x.detach() for x in self.live])

    def swap(self) -> None:
        """Exchange the contents of shadow and live by swapping their storage."""
        for i, tensor in enumerate(self.live):
            live_data = tensor.data
            tensor.data = self.shadow[i]
            self.shadow[i] = live_data
