"""Exponential moving average of weights and float buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.backends._torch import internals
from mtrain.backends._torch.native import Modes


class Average:
    """Moving average ("shadow") of the tensors ``live``; for evaluation the two swap storage without copying."""

    def __init__(
        self, names: Sequence[str], live: Sequence[Tensor], shares: Callable[[int], tuple[float, float]]
    ) -> None:
        """Start the average at the current values of ``live``.

        Args:
            names: Names of the tensors in ``live``, in the same order.
            live: The model's own tensors; they keep changing as it trains.
            shares: Maps the number of an update to (keep, take), see ``core.update.recipe.ema_shares``.
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


def nothing() -> None:
    """Do nothing: the tensors are the model's own memory."""


class OtherWeights:
    """The weights with which a script's optimizer evaluates, in the place of an average; see ``native.Modes``.

    Its methods compute one set of weights from the other, with rounding. So the trained set is copied before and restored
    afterwards: training goes on with the same bits whether or not it was evaluated.
    """

    def __init__(
        self, names: Sequence[str], live: Sequence[Tensor], modes: Modes, publish: Callable[[], None] = nothing
    ) -> None:
        """Switch the tensors ``live``; ``publish`` lets a library distribute new values where it must."""
        self.names = names
        self.live = live
        self._modes = modes
        self._publish = publish
        self._trained: list[Tensor] | None = None
        """The trained weights, while those of the evaluation are in their place."""

    @property
    def shadow(self) -> list[Tensor]:
        """Return copies of the weights with which the optimizer evaluates."""
        self._switch()
        evaluated = [tensor.detach().clone() for tensor in self.live]
        self._switch()
        return evaluated

    def follow(self, update: int) -> None:
        """Do nothing: the optimizer follows by itself."""

    def remember(self) -> None:
        """Do nothing: an update of such an optimizer is never late."""

    def restart(self) -> None:
        """Do nothing: the optimizer's state has been restored, or begins anew."""

    def swap(self) -> None:
        """Put the weights of the evaluation in the place of those that are trained, or the other way round."""
        self._switch()
        self._publish()

    @torch.no_grad()
    def _switch(self) -> None:
        trained, self._trained = self._trained, None
        if trained is None:
            self._trained = [tensor.detach().clone() for tensor in self.live]
            self._modes.evaluate()
        else:
            self._modes.train()
            internals.copy_([tensor.detach() for tensor in self.live], trained)
